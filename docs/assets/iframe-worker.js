// Search in a site that is opened as files: a browser starts no worker there, so a hidden frame runs the worker's script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc = "<!doctype html><body></body>"
      this.ready = new Promise((resolve) => {
        frame.onload = () => {
          const inside = frame.contentWindow
          inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
          inside.importScripts = (...urls) => Promise.all(urls.map((each) => addScript(inside, each)))
          addScript(inside, String(url)).then(() => resolve(inside))
        }
      })
      document.body.append(frame)
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })))
    }
  }
}

function addScript(view, url) {
  return new Promise((resolve, reject) => {
    const script = view.document.createElement("script")
    Object.assign(script, { src: url, onload: resolve, onerror: reject })
    view.document.body.append(script)
  })
}
