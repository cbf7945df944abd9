// Elements from words. Whatever comes from the server becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `props`: attributes; `on` followed by an event's name is a listener; false and null leave an attribute out. */
export function h(tag, props = {}, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** An SVG element, in the same way. */
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

/** Put `text` into `node` only if it says something new: readers and layout are left alone otherwise. */
export function say(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

/** Show `node` or not; it keeps no room when it is hidden. */
export function show(node, shown) {
  if (node.hidden === Boolean(shown)) node.hidden = !shown;
}

let count = 0;

/** An id that no other element of the page has. */
export function newId(stem) {
  count += 1;
  return `${stem}-${count}`;
}

const announcer = h("p", { role: "status", class: "unseen" });

/** Tell who listens instead of looking. */
export function announce(text) {
  if (!announcer.isConnected) document.body.append(announcer);
  announcer.textContent = text;
}
