// The 0/1 pattern of a matrix on a canvas: zoom, pan, and the density of rows and columns along the edges.

const EDGE = 44; // pixels for the densities

async function inflated(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// A pattern as cells of 0..255: weights, or squares of `factor` weights with the share that is kept.
async function decoded(meta, text) {
  const data = await inflated(text), { rows, columns, factor } = meta;
  const height = Math.ceil(rows / factor), width = Math.ceil(columns / factor);
  let cells = data;
  if (factor === 1) {
    const stride = Math.ceil(columns / 8);
    cells = new Uint8Array(rows * columns);
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns; column++) {
        if (data[row * stride + (column >> 3)] & (128 >> (column & 7))) cells[row * columns + column] = 255;
      }
    }
  }
  const across = new Float64Array(height), down = new Float64Array(width);
  for (let row = 0; row < height; row++) {
    for (let column = 0; column < width; column++) {
      const share = cells[row * width + column] / 255;
      across[row] += share / width;
      down[column] += share / height;
    }
  }
  return { cells, width, height, factor, rows, columns, across, down };
}

const byDensity = (shares) => Array.from(shares.keys()).sort((a, b) => shares[b] - shares[a] || a - b);

class PatternView {
  constructor(window_, colours) {
    this.window = window_; // {x0, x1, y0, y1} in shares of the matrix; one for all views, so that they move together
    this.colours = colours;
    this.canvas = element("canvas", { tabindex: "0", role: "img" });
    this.reading = element("div", { class: "reading", role: "status" });
    this.facts = element("dl", { class: "facts" });
    this.title = element("div", { class: "title" });
    this.node = element("div", { class: "pattern" }, this.title, this.canvas, this.reading, this.facts);
    this.pattern = null;
    this.sorted = false;
    this.onmove = () => {};
    this.listen();
  }

  async load(meta, text, sorted) {
    const wanted = (this.wanted = `${meta.tensor} ${sorted}`);
    const pattern = await decoded(meta, text);
    if (this.wanted !== wanted) return; // another was chosen meanwhile
    this.pattern = pattern;
    this.rowOrder = sorted ? byDensity(pattern.across) : null;
    this.columnOrder = sorted ? byDensity(pattern.down) : null;
    this.paint();
    this.draw();
  }

  // The whole pattern in its own resolution, once.
  paint() {
    const { cells, width, height } = this.pattern, [gone, kept] = this.colours().map(channels);
    const image = new ImageData(width, height);
    for (let row = 0; row < height; row++) {
      const from = (this.rowOrder ? this.rowOrder[row] : row) * width;
      for (let column = 0; column < width; column++) {
        const share = cells[from + (this.columnOrder ? this.columnOrder[column] : column)] / 255, at = 4 * (row * width + column);
        for (let c = 0; c < 3; c++) image.data[at + c] = gone[c] + share * (kept[c] - gone[c]);
        image.data[at + 3] = 255;
      }
    }
    this.picture = element("canvas", { width, height });
    this.picture.getContext("2d").putImageData(image, 0, 0);
  }

  draw() {
    if (!this.pattern) return;
    const { width, height } = this.pattern, { x0, x1, y0, y1 } = this.window;
    const across = this.canvas.clientWidth || 400, ratio = window.devicePixelRatio || 1;
    const tall = Math.round(EDGE + (across - EDGE) * Math.min(1.25, Math.max(0.5, height / width)));
    this.canvas.width = Math.round(across * ratio);
    this.canvas.height = Math.round(tall * ratio);
    this.canvas.style.height = `${tall}px`;
    const pen = this.canvas.getContext("2d"), [gone, kept, colour] = this.colours();
    pen.scale(ratio, ratio);
    const w = across - EDGE, h = tall - EDGE;
    this.frame = { w, h };
    const near = w / ((x1 - x0) * width) >= 1 && h / ((y1 - y0) * height) >= 1;
    pen.imageSmoothingEnabled = !near;
    pen.imageSmoothingQuality = "high";
    pen.fillStyle = gone;
    pen.fillRect(0, EDGE, w, h);
    pen.drawImage(this.picture, x0 * width, y0 * height, (x1 - x0) * width, (y1 - y0) * height, 0, EDGE, w, h);
    this.edge(pen, colour, this.pattern.down, this.columnOrder, x0, x1, w, (at, size, share) => pen.fillRect(at, EDGE - 4 - share * (EDGE - 8), size, share * (EDGE - 8)));
    this.edge(pen, colour, this.pattern.across, this.rowOrder, y0, y1, h, (at, size, share) => pen.fillRect(w + 4, EDGE + at, share * (EDGE - 8), size));
    this.canvas.classList.toggle("near", x1 - x0 < 0.999);
  }

  // Bars along an edge, one for each pixel or each row, whichever is wider; as long as the share, of the largest one.
  edge(pen, colour, shares, order, from, to, length, bar) {
    pen.fillStyle = colour;
    const most = shares.reduce((a, b) => Math.max(a, b), 1e-9), first = from * shares.length, count = (to - from) * shares.length;
    const bars = Math.max(1, Math.min(Math.round(length), Math.ceil(count)));
    for (let place = 0; place < bars; place++) {
      const start = Math.floor(first + (place / bars) * count), end = Math.max(start + 1, Math.floor(first + ((place + 1) / bars) * count));
      let sum = 0, seen = 0;
      for (let at = start; at < Math.min(end, shares.length); at++, seen++) sum += shares[order ? order[at] : at];
      const begin = Math.round((place / bars) * length), size = Math.max(1, Math.round(((place + 1) / bars) * length) - begin); // whole pixels: no seams
      if (seen) bar(begin, size, sum / seen / most);
    }
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect(), { x0, x1, y0, y1 } = this.window;
    const x = (event.clientX - box.left) / this.frame.w, y = (event.clientY - box.top - EDGE) / this.frame.h;
    if (x < 0 || x >= 1 || y < 0 || y >= 1) return null;
    return { x, y, column: Math.floor((x0 + x * (x1 - x0)) * this.pattern.width), row: Math.floor((y0 + y * (y1 - y0)) * this.pattern.height) };
  }

  read(event) {
    const cell = this.pattern && this.cellAt(event);
    if (!cell) { this.reading.textContent = ""; return; }
    const p = this.pattern, row = this.rowOrder ? this.rowOrder[cell.row] : cell.row, column = this.columnOrder ? this.columnOrder[cell.column] : cell.column;
    const share = p.cells[row * p.width + column] / 255, named = (at, size) => (p.factor === 1 ? at : `${at * p.factor}–${Math.min(size, (at + 1) * p.factor) - 1}`);
    const state = p.factor === 1 ? (share ? "kept" : "zero") : `${percent(share, 0)} kept`;
    this.reading.textContent = `row ${named(row, p.rows)} (keeps ${percent(p.across[row])}), column ${named(column, p.columns)} (keeps ${percent(p.down[column])}): ${state}`;
  }

  listen() {
    const pointers = new Map();
    this.canvas.addEventListener("pointerdown", (event) => { this.canvas.focus({ preventScroll: true }); pointers.set(event.pointerId, event); this.canvas.setPointerCapture(event.pointerId); });
    for (const kind of ["pointerup", "pointercancel"]) this.canvas.addEventListener(kind, (event) => pointers.delete(event.pointerId));
    this.canvas.addEventListener("pointerleave", () => { this.reading.textContent = ""; });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.frame) return;
      this.read(event);
      const before = pointers.get(event.pointerId);
      if (!before) return;
      pointers.set(event.pointerId, event);
      if (pointers.size === 1) this.pan((before.clientX - event.clientX) / this.frame.w, (before.clientY - event.clientY) / this.frame.h);
      else if (pointers.size === 2) {
        const other = [...pointers.values()].find((one) => one.pointerId !== event.pointerId), apart = (one) => Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
        this.zoom(apart(event) / Math.max(1, apart(before)));
      }
    });
    this.canvas.addEventListener("wheel", (event) => {
      const cell = this.pattern && this.cellAt(event);
      if (!cell || !(event.ctrlKey || event.metaKey || document.activeElement === this.canvas)) return; // else the page scrolls
      event.preventDefault();
      this.zoom(Math.exp(-event.deltaY / 400), cell.x, cell.y);
    }, { passive: false });
    this.canvas.addEventListener("dblclick", (event) => { const cell = this.cellAt(event); if (cell) this.zoom(2, cell.x, cell.y); });
    this.canvas.addEventListener("keydown", (event) => {
      const far = 0.15, moves = { ArrowLeft: [-far, 0], ArrowRight: [far, 0], ArrowUp: [0, -far], ArrowDown: [0, far] };
      if (event.key in moves) this.pan(...moves[event.key]);
      else if (event.key === "+" || event.key === "=") this.zoom(1.5);
      else if (event.key === "-") this.zoom(1 / 1.5);
      else if (event.key === "0") this.zoom(0);
      else return;
      event.preventDefault();
    });
  }

  pan(x, y) { moveWindow(this.window, x, y); this.onmove(); }
  zoom(factor, x = 0.5, y = 0.5) { zoomWindow(this.window, factor, x, y, this.pattern); this.onmove(); }
}

function moveWindow(box, x, y) {
  const w = box.x1 - box.x0, h = box.y1 - box.y0;
  box.x0 = Math.min(1 - w, Math.max(0, box.x0 + x * w));
  box.y0 = Math.min(1 - h, Math.max(0, box.y0 + y * h));
  box.x1 = box.x0 + w;
  box.y1 = box.y0 + h;
}

function zoomWindow(box, factor, x, y, pattern) {
  const least = pattern ? Math.min(1, 8 / Math.min(pattern.width, pattern.height)) : 0.02; // eight cells across
  const w = factor === 0 ? 1 : Math.min(1, Math.max(least, (box.x1 - box.x0) / factor)), h = w;
  box.x0 += x * (box.x1 - box.x0 - w);
  box.y0 += y * (box.y1 - box.y0 - h);
  box.x1 = box.x0 + w;
  box.y1 = box.y0 + h;
  moveWindow(box, 0, 0);
}

function channels(colour) {
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = colour;
  probe.fillRect(0, 0, 1, 1);
  return probe.getImageData(0, 0, 1, 1).data;
}
