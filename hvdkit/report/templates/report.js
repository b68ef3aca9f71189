"use strict";
// Tables: a click on a column's name sorts by it, a second one in reverse; cells without a figure come last.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, table = head.closest("table"), body = table.tBodies[0];
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const figures = head.classList.contains("figure");
    const key = (row) => {
      const cell = row.cells[head.cellIndex];
      return figures ? ("value" in cell.dataset ? Number(cell.dataset.value) : NaN) : cell.textContent;
    };
    const order = (a, b) => {
      const x = key(a), y = key(b);
      if (!figures) return (down ? -1 : 1) * x.localeCompare(y);
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return down ? y - x : x - y;
    };
    body.append(...[...body.rows].sort(order));
  });
}

// A table that is wider than its box becomes compact, or else is stacked: no column is cut. Without scripts it scrolls.
for (const table of document.querySelectorAll("table")) {
  const names = [...table.tHead.rows[0].cells].map((cell) => cell.textContent.trim());
  for (const row of table.tBodies[0].rows) {
    for (const cell of row.cells) cell.dataset.column = names[cell.cellIndex];
  }
}
const arrange = () => {
  for (const box of document.querySelectorAll(".scroll")) {
    box.classList.remove("compact", "stacked");
    for (const way of ["compact", "stacked"]) if (box.scrollWidth > box.clientWidth) box.classList.add(way);
  }
};
arrange();
addEventListener("resize", arrange);
document.addEventListener("toggle", arrange, true); // a table in closed <details> has no width

// Charts: a tooltip shows the value nearest to the pointer; arrow keys step through all of them.
const tooltip = document.getElementById("tooltip");
for (const drawing of document.querySelectorAll(".drawing")) {
  const points = JSON.parse(drawing.dataset.points), svg = drawing.querySelector("svg");
  const near = document.createElementNS("http://www.w3.org/2000/svg", "circle");
  near.setAttribute("class", "near");
  near.setAttribute("r", "6");
  let at = -1;
  const hide = () => { near.remove(); tooltip.hidden = true; };
  const show = (index) => {
    at = index;
    const [x, y, text] = points[index];
    near.setAttribute("cx", x);
    near.setAttribute("cy", y);
    svg.append(near);
    tooltip.textContent = text;
    tooltip.hidden = false;
    const place = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
    const left = Math.min(place.x + 12, document.documentElement.clientWidth - tooltip.offsetWidth - 8);
    const above = place.y - tooltip.offsetHeight - 12;
    tooltip.style.left = Math.max(8, left) + "px";
    tooltip.style.top = (above < 8 ? place.y + 14 : above) + "px";
  };
  const seek = (event) => {
    const here = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
    let best = -1, least = 40;
    points.forEach(([x, y], index) => {
      const distance = Math.hypot(x - here.x, y - here.y);
      if (distance < least) { best = index; least = distance; }
    });
    if (best < 0) hide(); else show(best);
  };
  drawing.addEventListener("pointermove", seek);
  drawing.addEventListener("pointerdown", seek);
  drawing.addEventListener("pointerleave", hide);
  drawing.addEventListener("blur", hide);
  drawing.addEventListener("keydown", (event) => {
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape") hide();
    if (!way || !points.length) return;
    event.preventDefault();
    show((at + way + points.length) % points.length);
  });
}
