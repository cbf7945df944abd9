// Lines of settings in the text of a config file, for messages about them. The server parses the text.

/** Line numbers, from 1, by path: of each section, key, and key of an inline table. */
export function linesOf(text) {
  const found = new Map();
  let section = [];
  let open = 0; // brackets of a value that goes on over several lines
  let quote = ""; // the quotes of a text that does
  text.split("\n").forEach((row, at) => {
    if (!open && !quote) {
      const head = /^\s*\[\[?\s*([^\]]+?)\s*\]\]?\s*(#.*)?$/.exec(row);
      if (head) {
        section = keysOf(head[1]);
        note(found, section, at + 1);
        return;
      }
      const key = /^\s*((?:"[^"]*"|'[^']*'|[\w.-]|\s*\.\s*)+?)\s*=/.exec(row);
      if (key) {
        const path = [...section, ...keysOf(key[1])];
        note(found, path, at + 1);
        for (const inner of row.slice(key[0].length).matchAll(/[{,]\s*("[^"]*"|'[^']*'|[\w.-]+)\s*=/g)) note(found, [...path, ...keysOf(inner[1])], at + 1);
      }
    }
    ({ open, quote } = after(row, open, quote));
  });
  return found;
}

function note(found, keys, line) {
  for (let count = 1; count <= keys.length; count += 1) {
    const path = keys.slice(0, count).join(".");
    if (!found.has(path)) found.set(path, line);
  }
}

function keysOf(text) {
  return [...text.matchAll(/"([^"]*)"|'([^']*)'|[\w-]+/g)].map((part) => part[1] ?? part[2] ?? part[0]);
}

/** Open brackets and quotes after `row`. */
function after(row, open, quote) {
  for (let at = 0; at < row.length; at += 1) {
    const letter = row[at];
    if (quote) {
      if (letter === "\\" && quote[0] === '"') at += 1;
      else if (row.startsWith(quote, at)) {
        at += quote.length - 1;
        quote = "";
      }
    } else if (letter === "#") break;
    else if (letter === '"' || letter === "'") {
      quote = row.startsWith(letter.repeat(3), at) ? letter.repeat(3) : letter;
      at += quote.length - 1;
    } else if (letter === "[" || letter === "{") open += 1;
    else if (letter === "]" || letter === "}") open = Math.max(0, open - 1);
  }
  return { open, quote: quote.length === 3 ? quote : "" };
}

/** The line of the setting at `path`, or of the nearest table around it; null if there is neither. */
export function lineOf(lines, path) {
  const keys = path.split(".");
  for (let count = keys.length; count > 0; count -= 1) {
    const line = lines.get(keys.slice(0, count).join("."));
    if (line) return line;
  }
  return null;
}
