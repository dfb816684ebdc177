"use strict";
(() => {
  const all = (root, query) => Array.from(root.querySelectorAll(query));
  const text = (value, percent) => {
    if (percent) return `${(100 * value).toFixed(1).replace(/\.0$/, "")} %`;
    const shown = Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
    return shown.replace("-", "−");
  };

  for (const chart of all(document, "[data-chart]")) {
    const data = JSON.parse(chart.dataset.chart);
    const area = chart.querySelector(".area");
    const cursor = chart.querySelector(".cursor");
    const outputs = all(chart, "output");
    const at = chart.querySelector(".at");
    const rest = outputs.map((output) => output.textContent);
    const nearest = (curve, step) =>
      curve.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
    const steps = data.curves.flat();
    const move = (event) => {
      const box = area.getBoundingClientRect();
      const share = Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1);
      const step = nearest(steps, data.x[0] + share * (data.x[1] - data.x[0]))[0];
      cursor.style.opacity = 0.6;
      cursor.style.left = `${(100 * (step - data.x[0])) / (data.x[1] - data.x[0])}%`;
      at.textContent = `step ${step}`;
      data.curves.forEach((curve, index) => {
        outputs[index].textContent = text(nearest(curve, step)[1], data.percent);
      });
    };
    const leave = () => {
      cursor.style.opacity = 0;
      at.textContent = "";
      outputs.forEach((output, index) => { output.textContent = rest[index]; });
    };
    area.addEventListener("pointermove", move);
    area.addEventListener("pointerdown", move);
    area.addEventListener("pointerleave", leave);
  }

  const episodes = all(document, ".episode");
  if (!episodes.length) return;
  document.body.classList.add("js");
  const shown = { episode: 0, when: "after", turn: 0 };
  let timer = 0;
  const press = (buttons, on) => buttons.forEach((button) => button.setAttribute("aria-pressed", String(on(button))));
  const play = () => episodes[shown.episode].querySelector(`.play[data-when=${shown.when}]`);
  const last = () => all(play(), ".slide").length - 1;

  const stop = () => {
    clearInterval(timer);
    timer = 0;
    all(document, "[data-go=play]").forEach((button) => { button.textContent = "Play"; });
  };
  const draw = () => {
    if (!play()) shown.when = "after";
    shown.turn = Math.min(Math.max(shown.turn, 0), last());
    episodes.forEach((episode, index) => episode.classList.toggle("on", index === shown.episode));
    press(all(document, ".chip"), (chip) => Number(chip.dataset.episode) === shown.episode);
    const episode = episodes[shown.episode];
    all(episode, ".play").forEach((part) => part.classList.toggle("on", part.dataset.when === shown.when));
    press(all(episode, ".tabs button"), (tab) => tab.dataset.when === shown.when);
    all(play(), ".slide").forEach((slide, index) => slide.classList.toggle("on", index === shown.turn));
    press(all(play(), ".film button"), (frame) => Number(frame.dataset.turn) === shown.turn);
    play().querySelector("[data-go='-1']").disabled = shown.turn === 0;
    play().querySelector("[data-go='1']").disabled = shown.turn === last();
  };
  const go = (change) => { stop(); Object.assign(shown, change); draw(); };
  const run = () => {
    if (timer) return stop();
    if (shown.turn === last()) shown.turn = 0;
    draw();
    play().querySelector("[data-go=play]").textContent = "Pause";
    timer = setInterval(() => {
      if (shown.turn >= last()) return stop();
      shown.turn += 1;
      draw();
    }, 1100);
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    const { episode, when, turn, go: way } = button.dataset;
    if (episode !== undefined) go({ episode: Number(episode), turn: 0 });
    else if (when !== undefined) go({ when, turn: 0 });
    else if (turn !== undefined) go({ turn: Number(turn) });
    else if (way === "play") run();
    else if (way !== undefined) go({ turn: shown.turn + Number(way) });
  });
  document.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (way && event.target.closest("#episodes")) { event.preventDefault(); go({ turn: shown.turn + way }); }
  });
  draw();
})();
