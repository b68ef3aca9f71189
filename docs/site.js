// Browsers start no worker for a page that is read from a folder. The site's search then runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = data => {
        const message = new MessageEvent("message", {data});
        this.onmessage?.(message);
        this.dispatchEvent(message);
      };
      const script = frame.contentDocument.createElement("script");
      script.src = url;
      this.ready = new Promise(done => script.addEventListener("load", done));
      frame.contentDocument.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", {data})));
    }
    terminate() {}
  };
}

// Which version is read, beside the title. versions.js lies above the versions' folders and lists them, newest first.
addEventListener("DOMContentLoaded", () => {
  const title = document.querySelector(".md-header__title");
  const [own, ...others] = [document.documentElement.dataset.version, ...(window.hvdkitVersions || [])];
  if (!title || !own) return;
  const select = document.createElement("select");
  select.className = "version";
  select.ariaLabel = "Version of hvdkit";
  for (const version of others.includes(own) ? others : [own, ...others]) {
    select.add(new Option(version, version, false, version === own));
  }
  const root = document.documentElement.dataset.root;
  select.addEventListener("change", () => { location.href = `${root}${select.value}/index.html`; });
  title.after(select);
});
