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
