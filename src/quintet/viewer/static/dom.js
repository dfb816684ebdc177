// Elements of the page.

const SVG = "http://www.w3.org/2000/svg";

/** Create an HTML element. Properties that start with "on" are event listeners; false and null are left out. */
export function h(tag, properties, ...children) {
  return build(document.createElement(tag), properties, children);
}

/** Create an SVG element. */
export function svg(tag, properties, ...children) {
  return build(document.createElementNS(SVG, tag), properties, children);
}

/** Replace the children of an element; null and false are left out. */
export function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

function build(element, properties, children) {
  for (const [name, value] of Object.entries(properties ?? {})) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** Return an element from HTML that the server built of escaped text. */
export function fromHtml(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content.firstElementChild;
}

/** Return a select element with `options`, pairs of value and label. */
export function select(label, options, value, onchange) {
  return h("label", { class: "field" }, h("span", {}, label),
    h("select", { onchange: (event) => onchange(event.target.value) },
      options.map(([option, text]) => h("option", { value: option, selected: String(option) === String(value) }, text))));
}

/** Return `action` delayed until `milliseconds` after its last call. */
export function debounce(action, milliseconds) {
  let timer = 0;
  return (...args) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...args), milliseconds);
  };
}

/** Return `action` as a function of which only the first call has an effect. */
export function once(action) {
  let isDone = false;
  return () => {
    if (!isDone) action();
    isDone = true;
  };
}
