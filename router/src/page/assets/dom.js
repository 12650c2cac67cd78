// Elements, made and changed without markup: whatever agents and clients name is only ever text.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** An element with attributes, or an `on…` listener, and children, which may be texts. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Puts a name there that is cut where there is no room for all; a replica's index stays. */
export function setName(element, name) {
  if (element.title === name) return;
  element.title = name;
  element.classList.add("cut");
  const index = name.includes("/") ? name.lastIndexOf("/") : name.length;
  element.replaceChildren(el("span", {}, name.slice(0, index)), el("span", {}, name.slice(index)));
}

/** Changes a text only where it differs, so that nothing is laid out or read aloud anew. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value);
}

/** Puts these children there, in this order, and moves only those that are elsewhere. */
export function arrange(parent, children) {
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
  while (parent.children.length > children.length) parent.lastElementChild.remove();
}

/** A table with a caption for those who do not see what it stands below. `rows` are arrays; the first cell names its row. */
export function table(caption, columns, rows) {
  const head = columns.map((column) => el("th", { scope: "col" }, column));
  const body = rows.map(([name, ...cells]) => el("tr", {}, el("th", { scope: "row" }, name), ...cells.map((cell) => el("td", {}, cell))));
  return el("table", {}, el("caption", { class: "unseen" }, caption), el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
}

/** One stop for Tab among many; arrows, Home and End move on. `items` lists them as they stand now. */
export function rove(container, items) {
  container.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
    const all = items();
    const at = all.indexOf(document.activeElement);
    if (at < 0) return;
    const to = event.key === "Home" ? 0 : event.key === "End" ? all.length - 1 : at + (steps[event.key] ?? 0);
    if (to === at || !all[to]) return;
    event.preventDefault();
    all[to].focus();
  });
  container.addEventListener("focusin", (event) => {
    if (items().includes(event.target)) keepOneStop(items(), event.target);
  });
}

export function keepOneStop(items, chosen) {
  const stop = items.includes(chosen) ? chosen : (items.find((item) => item.tabIndex === 0) ?? items[0]);
  for (const item of items) item.tabIndex = item === stop ? 0 : -1;
}

/** Says something to who listens to the page. */
export function announce(words) {
  byId("announcer").textContent = words;
}
