// Numbers and times as text.

/** Return a number with three significant digits. */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e6 || (size > 0 && size < 1e-4)) return value.toExponential(1).replace("e+", "e").replace("-", "−");
  const text = size >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
  return text.replace("-", "−");
}

/** Return seconds as "42 s", "3 min 5 s" or "2 h 10 min". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 10) return `${number(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

/** Return a count with its noun: "1 episode", "2,000 episodes". */
export function count(value, noun) {
  return `${value.toLocaleString("en")} ${noun}${value === 1 ? "" : "s"}`;
}
