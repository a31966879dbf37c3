// A pad for small grey pictures. Its value is the flat list of ink, 0 to 255, row by row.

const ZOOM = 12; // dots of the canvas for each pixel of the picture, at least
const SOON = 300; // milliseconds between the last stroke and telling it

class Pad {
  constructor(root, rows, columns, start, tell) {
    this.rows = rows;
    this.columns = columns;
    this.ink = new Float32Array(rows * columns);
    if (start && start.length === this.ink.length) this.ink.set(start.map((v) => v / 255));
    this.tell = tell;
    this.at = [Math.floor(rows / 2), Math.floor(columns / 2)];
    this.keyboard = false;
    this.erasing = false;
    this.last = null;
    this.timer = null;
    this.canvas = root.querySelector("canvas");
    this.said = root.querySelector(".said");
    this.pen = root.querySelector(".pen");
    this.eraser = root.querySelector(".eraser");
    this.clear = root.querySelector(".clear");
    this.zoom = Math.max(ZOOM, Math.ceil(336 / Math.max(rows, columns)));
    this.canvas.width = columns * this.zoom;
    this.canvas.height = rows * this.zoom;
    const size = Math.max(rows, columns);
    this.core = 0.2 + 0.022 * size; // radius of full ink, in pixels of the picture
    this.reach = 0.75 + 0.045 * size; // radius where the ink ends
    this.listeners = [];
    this.listen();
    this.show();
  }

  on(target, name, handler) {
    target.addEventListener(name, handler);
    this.listeners.push([target, name, handler]);
  }

  listen() {
    this.on(this.canvas, "pointerdown", (event) => {
      if (event.button > 0) return;
      this.canvas.setPointerCapture(event.pointerId);
      this.keyboard = false;
      this.last = null;
      this.stroke(this.place(event));
    });
    this.on(this.canvas, "pointermove", (event) => {
      if (!this.canvas.hasPointerCapture(event.pointerId)) return;
      const moves = event.getCoalescedEvents ? event.getCoalescedEvents() : [];
      for (const move of moves.length ? moves : [event]) this.stroke(this.place(move));
    });
    for (const name of ["pointerup", "pointercancel"]) this.on(this.canvas, name, () => this.later());
    this.on(this.canvas, "keydown", (event) => this.key(event));
    this.on(this.canvas, "focus", () => this.show());
    this.on(this.canvas, "blur", () => {
      this.keyboard = false;
      this.show();
    });
    this.on(this.pen, "click", () => this.use(false));
    this.on(this.eraser, "click", () => this.use(true));
    this.on(this.clear, "click", () => {
      this.ink.fill(0);
      this.show();
      this.say("cleared");
      this.now();
    });
  }

  use(erasing) {
    this.erasing = erasing;
    this.pen.setAttribute("aria-pressed", String(!erasing));
    this.eraser.setAttribute("aria-pressed", String(erasing));
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    if (moves[event.key]) {
      const [down, right] = moves[event.key];
      if (event.shiftKey) this.dot(this.at[0] + 0.5, this.at[1] + 0.5, this.erasing);
      this.at = [
        Math.min(this.rows - 1, Math.max(0, this.at[0] + down)),
        Math.min(this.columns - 1, Math.max(0, this.at[1] + right)),
      ];
      if (event.shiftKey) this.dot(this.at[0] + 0.5, this.at[1] + 0.5, this.erasing);
    } else if (event.key === " " || event.key === "Enter") {
      this.dot(this.at[0] + 0.5, this.at[1] + 0.5, this.erasing);
    } else if (event.key === "Backspace" || event.key === "Delete") {
      this.ink[this.at[0] * this.columns + this.at[1]] = 0;
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
    this.keyboard = true;
    const ink = Math.round(100 * this.ink[this.at[0] * this.columns + this.at[1]]);
    this.say(`row ${this.at[0] + 1}, column ${this.at[1] + 1}, ink ${ink} %`);
    this.show();
    if (event.shiftKey || !moves[event.key]) this.later();
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    return [
      ((event.clientY - box.top) / box.height) * this.rows,
      ((event.clientX - box.left) / box.width) * this.columns,
    ];
  }

  stroke([row, column]) {
    const [fromRow, fromColumn] = this.last ?? [row, column];
    const steps = Math.max(1, Math.ceil(4 * Math.hypot(row - fromRow, column - fromColumn)));
    for (let step = 1; step <= steps; step++) {
      const share = step / steps;
      this.dot(fromRow + share * (row - fromRow), fromColumn + share * (column - fromColumn), this.erasing);
    }
    this.last = [row, column];
    this.show();
  }

  dot(row, column, erase) {
    const first = Math.floor(this.reach) + 1;
    for (let r = Math.floor(row) - first; r <= Math.floor(row) + first; r++) {
      for (let c = Math.floor(column) - first; c <= Math.floor(column) + first; c++) {
        if (r < 0 || c < 0 || r >= this.rows || c >= this.columns) continue;
        const far = Math.hypot(r + 0.5 - row, c + 0.5 - column);
        const ink = Math.min(1, Math.max(0, (this.reach - far) / (this.reach - this.core)));
        const index = r * this.columns + c;
        this.ink[index] = erase ? Math.min(this.ink[index], 1 - ink) : Math.max(this.ink[index], ink);
      }
    }
  }

  show() {
    const context = this.canvas.getContext("2d");
    for (let r = 0; r < this.rows; r++) {
      for (let c = 0; c < this.columns; c++) {
        const grey = Math.round(255 * this.ink[r * this.columns + c]);
        context.fillStyle = `rgb(${grey}, ${grey}, ${grey})`;
        context.fillRect(c * this.zoom, r * this.zoom, this.zoom, this.zoom);
      }
    }
    const root = this.canvas.getRootNode();
    if (this.canvas.matches(":focus-visible") || (this.keyboard && root.activeElement === this.canvas)) {
      const [row, column] = this.at;
      for (const [colour, inset] of [["#000000", 0], ["#F0E442", 2], ["#000000", 4]]) {
        context.strokeStyle = colour;
        context.lineWidth = 2;
        const side = this.zoom - 2 * inset - 2;
        if (side > 0) context.strokeRect(column * this.zoom + inset + 1, row * this.zoom + inset + 1, side, side);
      }
    }
  }

  say(text) {
    this.said.textContent = text;
  }

  later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.now(), SOON);
  }

  now() {
    clearTimeout(this.timer);
    this.tell(Array.from(this.ink, (v) => Math.round(255 * v)));
  }

  fits(root, rows, columns) {
    return this.rows === rows && this.columns === columns && root.querySelector("canvas") === this.canvas;
  }

  end() {
    for (const [target, name, handler] of this.listeners) target.removeEventListener(name, handler);
    this.listeners = [];
  }
}

// Streamlit calls this again whenever the page runs; what is being drawn stays.
const pads = new WeakMap();

export default function (component) {
  const { parentElement, data, setStateValue } = component;
  const { rows, columns, label, start } = data;
  const tell = (ink) => setStateValue("ink", ink);
  let pad = pads.get(parentElement);
  if (pad) pad.end();
  if (pad && pad.fits(parentElement, rows, columns)) {
    pad.tell = tell;
    pad.listen();
  } else {
    parentElement.querySelector("canvas").setAttribute("aria-label", label);
    pad = new Pad(parentElement, rows, columns, start, tell);
    pads.set(parentElement, pad);
  }
  return () => pad.end();
}
