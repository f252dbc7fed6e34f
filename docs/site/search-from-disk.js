// Browsers start no worker for a page that is opened from disk, and the theme's search runs in one. Here the worker's
// script runs in a hidden frame instead, which exchanges messages with the page in the worker's place.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.addEventListener("load", () => this.start(frame, new URL(url, location.href).href), { once: true });
      (document.body || document.documentElement).append(frame);
    }

    start(frame, url) {
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.tell(data);
      inside.importScripts = () => { throw new Error("no further scripts are needed for a search in English"); };
      const script = inside.document.createElement("script");
      script.addEventListener("load", () => {
        this.inside = inside;
        for (const data of this.waiting.splice(0)) this.postMessage(data);
      });
      script.src = url;
      inside.document.body.append(script);
    }

    tell(data) {
      const event = new MessageEvent("message", { data });
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    postMessage(data) {
      if (!this.inside) { this.waiting.push(data); return; }
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }));
    }

    terminate() {}
  };
}
