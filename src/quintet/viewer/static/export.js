// Export of a view as one HTML file, which needs no server.

import { get, receivedData } from "view/api.js";

/** Download the page with the data that its view has received. */
export async function exportView(name, hash) {
  const data = receivedData();
  const assets = await get("assets");
  const modules = Object.keys(assets).filter((file) => file.endsWith(".js"));
  const imports = Object.fromEntries(modules.map((file) => [`view/${file}`, dataUrl("text/javascript", assets[file])]));
  const stored = { hash, data, images: await images() };
  const fields = {
    style: `<style>${assets["view.css"]}</style>`,
    tiles: assets["tiles.svg"],
    import_map: JSON.stringify({ imports }),
    // "<" would end the script element
    stored: `<script type="application/json" id="stored">${JSON.stringify(stored).replaceAll("<", "\\u003c")}</script>`,
    script: '<script type="module">import "view/main.js";</script>',
  };
  const page = assets["index.html"].replace(/\$(\w+)/g, (match, field) => fields[field] ?? match);
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([page], { type: "text/html" }));
  link.download = `${name.replace(/[^\w.-]+/g, "_")}.html`;
  link.click();
  URL.revokeObjectURL(link.href);
}

function dataUrl(type, text) {
  const bytes = new TextEncoder().encode(text);
  return `data:${type};base64,${btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""))}`;
}

/** Return the images of the view as data URLs, by URL. */
async function images() {
  const result = {};
  for (const image of document.querySelectorAll("img")) {
    const url = image.getAttribute("src");
    if (!url.startsWith("/")) continue;
    const blob = await (await fetch(url)).blob();
    result[url] = await new Promise((resolve) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.readAsDataURL(blob);
    });
  }
  return result;
}
