// Numbers and times as text, and elements of the page. Pure but for `element`.

export const UNKNOWN = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return UNKNOWN;
  const size = Math.abs(value);
  if (size >= 10 ** digits) return Math.round(value).toLocaleString("en-US");
  if (size !== 0 && size < 1e-4) return value.toExponential(1);
  return String(Number(value.toPrecision(digits)));
}

export const whole = (value) => (value === null || value === undefined ? UNKNOWN : Math.round(value).toLocaleString("en-US"));
export const signed = (value) => (value > 0 ? `+${whole(value)}` : value < 0 ? `-${whole(-value)}` : "0");
export const percent = (share) => (share === null || share === undefined ? UNKNOWN : `${(100 * share).toFixed(1)} %`);

export function milliseconds(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  return seconds >= 10 ? `${number(seconds)} s` : `${number(seconds * 1000)} ms`;
}

export function age(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 60) return `${Math.max(0, seconds).toFixed(0)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}

export function clock(unixSeconds) {
  return unixSeconds ? new Date(unixSeconds * 1000).toLocaleTimeString("en-GB") : UNKNOWN;
}

export function elapsed(seconds) {
  const total = Math.max(0, seconds);
  const minutes = Math.floor(total / 60);
  return minutes ? `${minutes} min ${(total % 60).toFixed(0).padStart(2, "0")} s` : `${total.toFixed(1)} s`;
}

// element("td", {class: "number"}, "text", child, ...): text is never parsed as HTML.
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
