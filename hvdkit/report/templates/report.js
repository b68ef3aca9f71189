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
