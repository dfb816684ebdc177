// A list of any length of which only the visible rows exist.

import { h } from "view/dom.js";

const PAGE = 100;

/**
 * A scrolling list. `load(first, count)` returns {total, rows}; `draw(row, index)` returns a row's element;
 * `choose(row, index)` is called for a click or the keyboard.
 */
export class VirtualList {
  constructor({ load, draw, choose, rowHeight, label }) {
    Object.assign(this, { load, draw, choose, rowHeight, pages: new Map(), total: 0, chosen: -1 });
    this.body = h("div", { class: "virtual-body" });
    this.element = h("div", { class: "virtual", tabindex: 0, role: "listbox", "aria-label": label,
      onscroll: () => this.render(), onkeydown: (event) => this.key(event) }, this.body);
    this.observer = new ResizeObserver(() => this.render());
    this.observer.observe(this.element);
  }

  /** Load the list anew. */
  async reset() {
    this.pages.clear();
    const { total } = await this.page(0);
    this.total = total;
    this.body.style.height = `${total * this.rowHeight}px`;
    this.render();
  }

  page(number) {
    if (!this.pages.has(number)) {
      const request = this.load(number * PAGE, PAGE);
      this.pages.set(number, request);
      request.catch(() => this.pages.delete(number));
    }
    return this.pages.get(number);
  }

  async render() {
    const first = Math.max(Math.floor(this.element.scrollTop / this.rowHeight) - 5, 0);
    const last = Math.min(first + Math.ceil(this.element.clientHeight / this.rowHeight) + 10, this.total);
    const rows = [];
    const pages = this.pages;
    for (let number = Math.floor(first / PAGE); number * PAGE < last; number += 1) {
      const page = await this.page(number).catch(() => null);
      if (!page) continue;
      page.rows.forEach((row, index) => {
        const position = number * PAGE + index;
        if (position >= first && position < last) rows.push([position, row]);
      });
    }
    if (pages !== this.pages) return;
    this.body.replaceChildren(...rows.map(([position, row]) => this.rowElement(position, row)));
  }

  rowElement(position, row) {
    return h("div", { class: position === this.chosen ? "virtual-row chosen" : "virtual-row", role: "option",
      "aria-selected": String(position === this.chosen), style: `top:${position * this.rowHeight}px;height:${this.rowHeight}px`,
      onclick: () => this.select(position) }, this.draw(row, position));
  }

  /** Choose a row by its position and scroll to it. */
  async select(position) {
    if (position < 0 || position >= this.total) return;
    this.chosen = position;
    const top = position * this.rowHeight;
    const { scrollTop, clientHeight } = this.element;
    if (top < scrollTop) this.element.scrollTop = top;
    if (top + this.rowHeight > scrollTop + clientHeight) this.element.scrollTop = top + this.rowHeight - clientHeight;
    this.render();
    const page = await this.page(Math.floor(position / PAGE));
    this.choose(page.rows[position % PAGE], position);
  }

  key(event) {
    const move = { ArrowDown: 1, ArrowUp: -1, PageDown: 20, PageUp: -20 }[event.key];
    if (!move) return;
    event.preventDefault();
    this.select(Math.min(Math.max(this.chosen + move, 0), this.total - 1));
  }
}
