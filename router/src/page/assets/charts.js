// The lines of the last hour. A chart is a picture with a name that says what it shows; its numbers are in a table below.

import { el, setAttribute, setText, svg, table } from "./dom.js";
import { clock, percent, seconds, short } from "./figures.js";
import { failedPerSecond } from "./model.js";

/** Minutes that a chart may show: the fewest that have all points, so that a young router's are no sliver. */
const SPANS = [6, 15, 30, 60];
const WIDTH = 900;
const HEIGHT = 100;

const COLUMNS = [
  "Until",
  "Requests/s",
  "Failed/s",
  "Refused",
  "Waiting here",
  "In engines",
  "Running",
  "Tokens/s",
  "First token, median",
  "99 %",
  "Between tokens",
  "KV in use",
];

/** Steps for the top of an axis: 1, 2, 5, 10 and so on. */
function roundUp(value) {
  const scale = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * scale).find((step) => step >= value * 0.999);
}

/** `lines` are `{name, of, mark}`, the first of which has its area filled; `format` writes their values. `most` is the top of the axis where that is fixed. */
export class Chart {
  constructor(parent, title, lines, format, most = null) {
    Object.assign(this, { lines, format, fixed: most, samples: [], end: 0, minutes: SPANS[0] });
    this.values = lines.map(() => el("b", { class: "value" }, "–"));
    const keys = lines.map((line, index) => el("span", { class: `key ${line.mark}` }, line.name, " ", this.values[index]));
    this.moment = el("span", { class: "note moment" }, "now");
    this.area = svg("path", { class: `area ${lines[0].mark}` });
    this.paths = lines.map((line) => svg("path", { class: `line ${line.mark}` }));
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    const grid = [0, 0.5, 1].map((share) => svg("line", { class: "grid", x1: 0, x2: WIDTH, y1: share * HEIGHT, y2: share * HEIGHT }));
    const box = { class: "plot", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": title };
    this.picture = svg("svg", box, ...grid, this.area, ...this.paths.toReversed(), this.cursor);
    this.top = el("span", { class: "top" });
    this.empty = el("p", { class: "empty" }, "Nothing yet: each ten seconds add a point.");
    this.title = title;
    this.ages = el("div", { class: "ages", "aria-hidden": "true" });
    const frame = el("div", { class: "frame" }, this.picture, this.top, this.empty);
    parent.append(el("div", { class: "heading" }, el("h3", {}, title), this.moment, ...keys), frame, this.ages);
    frame.addEventListener("pointermove", (event) => this.point(event));
    frame.addEventListener("pointerleave", () => this.point(null));
  }

  update(samples, end) {
    // Between two samples only the right edge would move.
    if (samples === this.samples) return;
    Object.assign(this, { samples, end: samples.at(-1)?.at ?? end });
    const age = (this.end - (samples.find((sample) => this.lines.some((line) => line.of(sample) !== null))?.at ?? this.end)) / 60_000;
    this.minutes = SPANS.find((minutes) => minutes >= age - 0.5) ?? SPANS.at(-1);
    const third = this.minutes / 3;
    const told = [`${this.minutes} min ago`, (2 * third).toFixed(0), third.toFixed(0), "now"];
    if (this.ages.textContent !== told.join("")) this.ages.replaceChildren(...told.map((words) => el("span", {}, words)));
    const values = this.lines.flatMap((line) => samples.map(line.of)).filter((value) => value !== null);
    const most = Math.max(0, ...values);
    this.most = this.fixed ?? (most > 0 ? roundUp(most) : 1);
    setText(this.top, most > 0 ? this.format(this.most).replace(/\.0+(?=\D|$)/, "") : "");
    this.empty.hidden = values.length > 0;
    this.lines.forEach((line, index) => setAttribute(this.paths[index], "d", this.path(line)));
    const first = this.path(this.lines[0]);
    setAttribute(this.area, "d", this.areaBelow(this.lines[0]));
    if (first) this.describe();
    this.show(samples.at(-1));
  }

  x(sample) {
    return WIDTH - ((this.end - sample.at) / (this.minutes * 60_000)) * WIDTH;
  }

  y(value) {
    return HEIGHT - (value / this.most) * (HEIGHT - 3);
  }

  /** The stretches without a gap. */
  runs(line) {
    const runs = [[]];
    for (const sample of this.samples) {
      const value = line.of(sample);
      if (value === null) runs.push([]);
      else runs.at(-1).push([this.x(sample).toFixed(1), this.y(value).toFixed(1)]);
    }
    return runs.filter((run) => run.length > 0);
  }

  path(line) {
    // A single point is as wide as its ten seconds.
    const draw = (run) => (run.length > 1 ? `M${run.map((point) => point.join(" ")).join("L")}` : `M${run[0][0] - 8} ${run[0][1]}H${run[0][0]}`);
    return this.runs(line).map(draw).join("");
  }

  areaBelow(line) {
    const draw = (run) => `M${run[0][0]} ${HEIGHT}L${run.map((point) => point.join(" ")).join("L")}L${run.at(-1)[0]} ${HEIGHT}Z`;
    return this.runs(line).filter((run) => run.length > 1).map(draw).join("");
  }

  describe() {
    const last = this.samples.at(-1);
    const said = this.lines.map((line) => `${line.name} ${this.write(line.of(last))}, at most ${this.write(this.largest(line))}`);
    setAttribute(this.picture, "aria-label", `${this.title} over the last ${this.minutes} minutes: ${said.join("; ")}`);
  }

  largest(line) {
    const values = this.samples.map(line.of).filter((value) => value !== null);
    return values.length > 0 ? Math.max(...values) : null;
  }

  write(value) {
    return value === null || value === undefined ? "–" : this.format(value);
  }

  show(sample) {
    this.lines.forEach((line, index) => setText(this.values[index], sample ? this.write(line.of(sample)) : "–"));
  }

  /** Shows the values where the pointer is. */
  point(event) {
    let sample = this.samples.at(-1);
    if (event && sample) {
      const box = this.picture.getBoundingClientRect();
      const x = ((event.clientX - box.left) / box.width) * WIDTH;
      const nearest = (best, one) => (Math.abs(this.x(one) - x) < Math.abs(this.x(best) - x) ? one : best);
      sample = this.samples.reduce(nearest);
      setAttribute(this.cursor, "x1", this.x(sample));
      setAttribute(this.cursor, "x2", this.x(sample));
    }
    setAttribute(this.cursor, "visibility", event && sample ? "visible" : "hidden");
    setText(this.moment, event && sample ? clock(sample.at) : "now");
    this.show(sample);
  }
}

/** The lines' numbers, the latest first. */
export function samplesTable(samples) {
  const rows = samples.toReversed().map((sample) => [
    clock(sample.at),
    sample.requests_per_second.toFixed(1),
    failedPerSecond(sample).toFixed(1),
    reasons(sample.refused),
    String(sample.queued),
    String(sample.waiting),
    String(sample.running),
    short(sample.tokens_per_second),
    seconds(sample.first_tokens?.p50),
    seconds(sample.first_tokens?.p99),
    seconds(sample.between_tokens),
    sample.kv_use === null ? "–" : percent(sample.kv_use),
  ]);
  return table("The last hour, in steps of ten seconds", COLUMNS, rows);
}

const reasons = (refused) => Object.entries(refused).map(([reason, count]) => `${reason.replaceAll("_", " ")} ${count}`).join(", ") || "–";
