// Small charts in SVG: curves over steps or layers, with a tooltip that follows pointer and arrow keys.

const SVG = "http://www.w3.org/2000/svg";

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (name === "style") for (const [key, entry] of Object.entries(value)) made.style.setProperty(key, entry);
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function drawn(tag, attributes = {}, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const swatch = (colour) => element("span", { class: "swatch", style: { "--colour": colour }, "aria-hidden": "true" });

// ---------------------------------------------------------------- numbers

const number = (value, digits = 2) => value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (value, digits = 1) => `${number(100 * value, digits)}\u00a0%`;

function plainly(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e");
  return String(Number(value.toPrecision(4)));
}

function shortly(value) {
  if (value >= 1e6) return `${plainly(value / 1e6)}M`;
  return value >= 1e4 ? `${plainly(value / 1e3)}k` : plainly(value);
}

function ticks(low, high, wanted) {
  const rough = (high - low) / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.999);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-6; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

// ---------------------------------------------------------------- a chart of curves

// spec: series [{name, colour, x, y, dash, dots, area, key}], marks [{x, colour}], xLabel, label, xFormat, yFormat, tipX, tipFormat,
// names (labels of whole-number x), left, right, low, high, log, height, empty (what to say if there is nothing)
function curves(host, spec, legend) {
  host.replaceChildren();
  const shown = spec.series.filter((one) => one.x.length);
  if (legend) host.append(legend);
  if (!shown.length) {
    host.append(element("p", { class: "empty" }, spec.empty || "Nothing to show."));
    return;
  }
  const width = Math.max(260, host.clientWidth || 480), height = spec.height || Math.min(270, Math.max(210, width * 0.52));
  const scale = scales(shown, spec, width, height);
  const picture = drawn("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: "0", "aria-label": spec.label, focusable: "true" });
  axes(picture, spec, scale, width, height);
  marks(picture, spec, scale, height);
  for (const one of shown) picture.append(...strokes(one, scale, spec));
  host.append(picture);
  follow(host, picture, shown, spec, scale, width, height);
}

function scales(shown, spec, width, height) {
  const flat = (name) => shown.flatMap((one) => one[name]).filter((value) => value !== null && (name === "x" || !spec.log || value > 0));
  const xs = flat("x"), ys = flat("y");
  const smallest = (values) => values.reduce((a, b) => Math.min(a, b), Infinity), largest = (values) => values.reduce((a, b) => Math.max(a, b), -Infinity);
  let left = spec.left ?? smallest(xs), right = spec.right ?? largest(xs);
  if (left === right) { left -= 0.5; right += 0.5; } else if (spec.names) { left -= 0.35; right += 0.35; }
  let low = spec.low ?? smallest(ys), high = spec.high ?? largest(ys);
  if (spec.log) { low = Math.log10(low); high = Math.log10(high); }
  if (high - low < 1e-12) { const pad = Math.abs(high) * 0.05 || 0.5; high += pad; low -= spec.low === undefined ? pad : 0; }
  const room = (high - low) * 0.06;
  if (spec.low === undefined) low -= room;
  if (spec.high === undefined) high += room;
  const frame = { left: 52, right: width - 10, top: 10, bottom: height - 38 };
  const measure = (value) => (spec.log ? Math.log10(value) : value);
  return {
    frame, low, high, left, right,
    x: (value) => frame.left + ((value - left) / (right - left)) * (frame.right - frame.left),
    y: (value) => frame.bottom - ((measure(value) - low) / (high - low)) * (frame.bottom - frame.top),
    at: (pixel) => left + ((pixel - frame.left) / (frame.right - frame.left)) * (right - left),
  };
}

function axes(picture, spec, scale, width, height) {
  const { frame } = scale, format = spec.yFormat || plainly;
  const levels = spec.log ? decades(scale.low, scale.high) : ticks(scale.low, scale.high, 4);
  for (const level of levels) {
    const y = scale.y(level);
    picture.append(drawn("line", { class: "gridline", x1: frame.left, x2: frame.right, y1: y, y2: y }),
      drawn("text", { x: frame.left - 8, y: y + 4, "text-anchor": "end" }, format(level)));
  }
  picture.append(drawn("line", { class: "axis", x1: frame.left, x2: frame.right, y1: frame.bottom, y2: frame.bottom }));
  const places = spec.names ? thinned(spec.names, (frame.right - frame.left) / 26) : ticks(scale.left, scale.right, width / 95);
  for (const place of places) {
    const name = spec.names ? spec.names[place] : (spec.xFormat || shortly)(place);
    picture.append(drawn("text", { x: scale.x(place), y: frame.bottom + 16, "text-anchor": "middle" }, name));
  }
  picture.append(drawn("text", { x: frame.right, y: height - 5, "text-anchor": "end" }, spec.xLabel));
}

function thinned(names, most) {
  const every = Math.max(1, Math.ceil(names.length / most));
  return names.map((_, place) => place).filter((place) => place % every === 0);
}

function decades(low, high) {
  const found = [];
  for (let power = Math.ceil(low); power <= high; power++) found.push(10 ** power);
  const every = Math.ceil(found.length / 5);
  return found.filter((_, place) => place % every === 0);
}

function marks(picture, spec, scale, height) {
  const all = (spec.marks || []).filter((mark) => mark.x >= scale.left && mark.x <= scale.right);
  for (const mark of all) {
    const x = scale.x(mark.x), y = scale.frame.bottom;
    if (all.length <= 40) picture.append(drawn("line", { class: "mark", x1: x, x2: x, y1: scale.frame.top, y2: y, style: `stroke: ${mark.colour}` }));
    picture.append(drawn("path", { class: "teacher", d: `M${x - 4} ${y + 1}h8l-4 -7z`, style: `fill: ${mark.colour}` }));
  }
}

function strokes(one, scale, spec) {
  const points = one.x.map((x, place) => [x, one.y[place]]).filter(([, y]) => y !== null && (!spec.log || y > 0));
  const path = points.map(([x, y], place) => `${place ? "L" : "M"}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`).join("");
  const made = [];
  if (one.area && points.length > 1) {
    const ends = `L${scale.x(points.at(-1)[0]).toFixed(1)} ${scale.frame.bottom}L${scale.x(points[0][0]).toFixed(1)} ${scale.frame.bottom}z`;
    made.push(drawn("path", { class: "area", d: path + ends, style: `fill: ${one.colour}` }));
  }
  made.push(drawn("path", { class: "curve", d: path, "data-series": one.key || one.name, "stroke-dasharray": one.dash, style: `stroke: ${one.colour}` }));
  if (one.dots || points.length === 1) {
    for (const [x, y] of points) made.push(drawn("circle", { cx: scale.x(x), cy: scale.y(y), r: 3, style: `fill: ${one.colour}` }));
  }
  return made;
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
}

function follow(host, picture, shown, spec, scale, width, height) {
  const cross = drawn("line", { class: "cross", y1: scale.frame.top, y2: scale.frame.bottom, visibility: "hidden" });
  const tip = element("div", { class: "tip", hidden: "", role: "status" });
  picture.append(cross);
  host.append(tip);
  const longest = shown.reduce((a, b) => (b.x.length > a.x.length ? b : a));
  let place = null;
  const show = (wanted) => {
    place = Math.min(longest.x.length - 1, Math.max(0, wanted));
    const x = longest.x[place], at = scale.x(x);
    cross.setAttribute("x1", at);
    cross.setAttribute("x2", at);
    cross.setAttribute("visibility", "visible");
    const head = spec.names ? `${spec.xLabel} ${spec.names[x]}` : `${spec.xLabel} ${(spec.tipX || whole)(x)}`;
    const teachers = (spec.marks || []).filter((mark) => mark.x === x);
    tip.replaceChildren(element("div", { class: "head" }, head + (teachers.length ? " · new teacher" : "")));
    for (const one of shown) {
      const value = one.y[nearest(one.x, x)];
      if (value === null || value === undefined) continue;
      const text = (spec.tipFormat || spec.yFormat || plainly)(value);
      tip.append(element("div", { class: "row" }, swatch(one.colour), element("span", {}, one.name), element("span", { class: "value" }, text)));
    }
    tip.hidden = false;
    const ratio = picture.clientWidth / width, room = host.clientWidth - tip.offsetWidth;
    const left = at * ratio + 12 > room ? at * ratio - tip.offsetWidth - 12 : at * ratio + 12;
    tip.style.left = `${Math.max(0, Math.min(room, left))}px`;
    tip.style.top = `${picture.offsetTop + 4}px`;
  };
  const hide = () => { place = null; tip.hidden = true; cross.setAttribute("visibility", "hidden"); };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    show(nearest(longest.x, scale.at(((event.clientX - box.left) / box.width) * width)));
  });
  picture.addEventListener("pointerleave", hide);
  picture.addEventListener("blur", hide);
  picture.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 10 : 1, moves = { ArrowRight: far, ArrowLeft: -far };
    if (event.key in moves) { show((place ?? -1) + moves[event.key]); event.preventDefault(); }
    if (event.key === "Escape") hide();
  });
}
