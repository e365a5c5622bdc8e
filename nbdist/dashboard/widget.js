// The panel in the page: keeps every point that came, draws them with BokehJS, sends what is clicked.
//
// The points live beside the model, not in a view: a second view, or one that is scrolled in late, has all of them.
// `window.__nbdist.panels[key]` says what is there: {run, steps, points, last, drawn, frames, gaps, views}.

const shared = (globalThis.__nbdist ??= { page: crypto.getRandomValues(new Uint32Array(4)).join("-"), panels: {}, bokeh: {} });
const INTERRUPT_AFTER = 1500; // ms: by then a kernel that can hear Stop while a cell runs has answered

// ---- BokehJS: once a page and version, apart from any other BokehJS in the page -----------------------------------

function slot(version) {
  if (!shared.bokeh[version]) {
    const entry = (shared.bokeh[version] = { loads: 0 });
    entry.promise = new Promise((resolve, reject) => Object.assign(entry, { resolve, reject }));
  }
  return shared.bokeh[version];
}

async function provide(version, zipped) {
  const entry = slot(version);
  if (entry.loads++) return;
  try {
    const text = await new Response(new Blob([zipped]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
    // as a module of its own: `this` is the object that the script hangs `Bokeh` on, and the page's window stays as it is
    const source = `const root = {};\n(function () {\n${text}\n}).call(root);\nexport default root.Bokeh;\n`;
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    const bokeh = (await import(/* webpackIgnore: true */ url)).default;
    URL.revokeObjectURL(url);
    bokeh.set_log_level?.("error"); // it warns of every figure that has no points yet
    entry.resolve(bokeh);
  } catch (error) {
    entry.reject(error);
  }
}

// ---- the points of one panel --------------------------------------------------------------------------------------

class Points {
  constructor(model) {
    this.model = model;
    this.version = model.get("version");
    this.seq = -1;
    this.columns = new Map(); // series -> {x, mean, low, high}
    this.state = { head: { run: null, status: "" }, chips: [], runs: [], running: false, blocking: false, dropped: 0 };
    this.listeners = new Set();
    this.views = 0;
    this.info = shared.panels[model.get("key")] = { points: {}, last: {}, drawn: {}, frames: 0, gaps: 0, views: 0 };
    this.take(model.get("frame"), model.get("data"));
  }

  take(frame, data) {
    for (const name of Object.keys(this.state)) if (frame?.[name] !== undefined) this.state[name] = frame[name];
    if (frame?.series) this.takePoints(frame, data);
    const { info, state } = this;
    Object.assign(info, { run: state.head.run, steps: state.head.steps ?? 0, running: state.running });
    for (const listener of this.listeners) listener();
  }

  takePoints(frame, data) {
    const { info } = this;
    info.frames += 1;
    if (!frame.whole) {
      if (frame.seq <= this.seq) return; // part of the whole that came before
      if (frame.seq !== this.seq + 1) {
        if (this.seq >= 0) info.gaps += 1;
        this.seq = -1; // wait for a whole frame: it comes by itself, sooner when the kernel can hear us
        this.model.send({ kind: "resync" });
        return;
      }
    } else {
      this.columns.clear();
      info.points = {};
      info.last = {};
    }
    this.seq = frame.seq;
    const bytes = new Uint8Array(data.buffer ?? data, data.byteOffset ?? 0, data.byteLength);
    const numbers = new Float64Array(bytes.slice().buffer); // a copy: buffers of messages are not aligned
    let at = 0;
    for (const [series, start, count] of frame.series) {
      const old = this.columns.get(series);
      const columns = {};
      for (const name of ["x", "mean", "low", "high"]) {
        const column = (columns[name] = new Float64Array(start + count));
        if (old) column.set(old[name].subarray(0, start));
        column.set(numbers.subarray(at, at + count), start);
        at += count;
      }
      this.columns.set(series, columns);
      info.points[series] = start + count;
      info.last[series] = columns.x.at(-1);
    }
  }

  addView(change) {
    this.views = this.info.views = this.views + change;
    this.model.send({ kind: "views", count: this.views });
  }
}

function initialize({ model }) {
  const points = new Points(model);
  const key = model.get("key");
  registry.set(key, points);
  const zipped = model.get("bokehjs");
  if (zipped?.byteLength) {
    provide(points.version, zipped);
    model.set("bokehjs", new DataView(new ArrayBuffer(0))); // a page that saves widget states need not save this
  }
  const hear = (message, buffers) => {
    if (message.kind === "frame") points.take(message, buffers[0]);
    else if (message.kind === "bokehjs") provide(message.version, buffers[0]);
    else if (message.kind === "stopping") points.heard?.();
  };
  model.on("msg:custom", hear);
  model.send({ kind: "hello", page: shared.page, bokeh: slot(points.version).loads > 0 });
  return () => {
    model.off("msg:custom", hear);
    registry.delete(key);
    delete shared.panels[key];
  };
}

const registry = new Map(); // this module is loaded once a model; the map is for its views

// ---- a view -------------------------------------------------------------------------------------------------------

function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function render({ model, el }) {
  const points = registry.get(model.get("key"));
  const root = element("div", "nbdist-panel");
  const title = element("strong", "nbdist-run");
  const select = element("select", "nbdist-runs");
  select.setAttribute("aria-label", "run to show");
  const status = element("span", "nbdist-status");
  status.setAttribute("role", "status");
  const stop = element("button", "nbdist-stop jupyter-button", "Stop");
  const bar = element("progress", "nbdist-progress");
  bar.setAttribute("aria-label", "steps done");
  const facts = element("div", "nbdist-facts");
  const chips = element("div", "nbdist-chips");
  chips.setAttribute("role", "list");
  chips.setAttribute("aria-label", "ranks");
  const plots = element("div", "nbdist-plots");
  const first = element("div", "nbdist-row");
  first.append(title, select, status, stop);
  root.append(first, bar, facts, chips, plots);
  el.append(root);

  let asked = null; // the run that Stop was pressed in
  stop.onclick = () => {
    asked = points.state.head.run ?? "";
    model.send({ kind: "stop" });
    if (points.state.blocking) {
      const timer = setTimeout(() => interrupt(model.get("kernel")), INTERRUPT_AFTER);
      points.heard = () => clearTimeout(timer);
    }
    draw();
  };
  select.onchange = () => model.send({ kind: "show", run: select.value });

  const figures = new Map(); // series -> {source, document, views, node}
  let closed = false;
  const failed = (error) => {
    console.error("nbdist:", error);
    plots.textContent = `BokehJS ${points.version} cannot be used in this page (${error}). The numbers above are live.`;
  };
  const build = async () => {
    const bokeh = await slot(points.version).promise;
    for (const { series, title: label, legend, item } of JSON.parse(model.get("figures"))) {
      if (closed) return;
      if (figures.has(series)) continue;
      const figure = { node: element("div", "nbdist-plot") };
      figures.set(series, figure);
      figure.node.hidden = true;
      const caption = element("div", "nbdist-legend");
      caption.append(element("strong", "", label));
      for (const [kind, color, text] of legend) {
        const swatch = element("span", `nbdist-swatch nbdist-${kind}`);
        swatch.style.background = color;
        caption.append(swatch, text);
      }
      const canvas = element("div");
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${label} by step`);
      figure.node.append(caption, canvas);
      plots.append(figure.node);
      figure.bokeh = bokeh;
      figure.views = await bokeh.embed.embed_item(item, canvas);
      figure.document = figure.views.roots[0].model.document;
      figure.source = figure.document.get_model_by_name("points");
    }
    later();
  };

  let planned = false;
  const later = () => {
    if (planned || closed) return;
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      if (!closed) draw();
    });
  };
  const known = {}; // what is on the page: the DOM is touched only where something changed
  const once = (name, value, apply) => {
    const text = JSON.stringify(value);
    if (known[name] !== text) {
      known[name] = text;
      apply(value);
    }
  };
  const draw = () => {
    const { head, runs, running } = points.state;
    if (!running || (asked !== null && asked !== (head.run ?? ""))) asked = null;
    once("title", head.run ?? "nbdist", (text) => (title.textContent = text));
    once("runs", [runs, head.run], () => {
      select.replaceChildren(...runs.map((name) => new Option(name, name, false, name === head.run)).reverse());
      select.hidden = runs.length < 2;
      title.hidden = runs.length >= 2;
    });
    const words = asked !== null ? "stopping…" : head.status;
    once("status", words, (text) => (status.textContent = text));
    once("stop", !running || asked !== null, (off) => (stop.disabled = off));
    once("bar", [head.step, head.total, head.ended], () => {
      bar.hidden = head.run === null || (!head.total && head.ended);
      if (head.total) Object.assign(bar, { max: head.total, value: head.step });
      else bar.removeAttribute("value");
    });
    const lost = points.state.dropped ? [`${points.state.dropped} records lost`] : [];
    once("facts", [...(head.facts ?? []), ...lost], (list) =>
      facts.replaceChildren(...list.map((text) => element("span", "nbdist-fact", text))));
    facts.title = head.note ?? "";
    once("chips", points.state.chips, (list) => chips.replaceChildren(...list.map((chip) => chipOf(chip, list.length > 16))));
    for (const [series, figure] of figures) {
      const columns = points.columns.get(series);
      const empty = !columns && series !== "loss" && series !== "samples_per_s";
      if (figure.node.hidden !== empty) figure.node.hidden = empty;
      if (!figure.source || figure.columns === columns) continue;
      figure.columns = columns;
      figure.source.data = { ...(columns ?? { x: [], mean: [], low: [], high: [] }) };
      points.info.drawn[series] = columns ? columns.x.length : 0;
    }
  };

  const rebuild = () => build().catch(failed);
  points.listeners.add(later);
  points.addView(1);
  model.on("change:figures", rebuild);
  rebuild();
  draw();
  return () => {
    closed = true;
    points.listeners.delete(later);
    points.addView(-1);
    model.off("change:figures", rebuild);
    for (const { bokeh, document: ours, views } of figures.values()) {
      views?.clear?.();
      ours?.clear?.();
      const at = bokeh ? bokeh.documents.indexOf(ours) : -1;
      if (at >= 0) bokeh.documents.splice(at, 1);
    }
    root.remove();
  };
}

function chipOf([rank, state, detail], many) {
  // with many ranks a letter stands for the state; the label has it in full
  const chip = element("span", "nbdist-chip", many ? `${rank}${state[0]}` : `${rank} ${state}`);
  const said = `rank ${rank}: ${state}${detail ? `, ${detail}` : ""}`;
  chip.dataset.state = state;
  chip.title = said;
  chip.setAttribute("role", "listitem");
  chip.setAttribute("aria-label", said);
  return chip;
}

// A kernel without subshells hears Stop only after the cell: its server's interrupt, which the cell turns into the same
// stop, gets through.
function interrupt(kernel) {
  const config = document.getElementById("jupyter-config-data");
  if (!kernel || !config) return;
  const { baseUrl = "/", token = "" } = JSON.parse(config.textContent);
  const headers = {};
  const xsrf = document.cookie.match(/(?:^|; )_xsrf=([^;]*)/);
  if (xsrf) headers["X-XSRFToken"] = xsrf[1];
  if (token) headers.Authorization = `token ${token}`;
  fetch(`${baseUrl}api/kernels/${kernel}/interrupt`, { method: "POST", headers, credentials: "same-origin" });
}

export default { initialize, render };
