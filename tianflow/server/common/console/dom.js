// Makes elements. Data of the server becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `props`: attributes; `on` and an event's name add a listener; false and null omit an attribute. */
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** An SVG element; arguments as for `h`. */
export function s(tag, props = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) {
      node.addEventListener(name.slice(2), value);
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value === true ? "" : String(value));
    }
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Set the text of `node` if it differs, so that screen readers and layout are not disturbed. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Show or hide `node`; a hidden node takes no space. */
export function show(node, shown) {
  if (node.hidden === Boolean(shown)) node.hidden = !shown;
}

let count = 0;

/** A unique id. */
export function newId(stem) {
  count += 1;
  return `${stem}-${count}`;
}

const announcer = h("p", { role: "status", class: "unseen" });

/** Announce `text` to screen readers. */
export function announce(text) {
  if (!announcer.isConnected) document.body.append(announcer);
  announcer.textContent = text;
}
