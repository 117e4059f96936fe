// The step, the group and the search in the page's address, so that a link leads to what is seen.
const KEYS = ["step", "group", "search"];

export function readAddress() {
  const given = new URLSearchParams(window.location.hash.slice(1));
  return Object.fromEntries(KEYS.map((key) => [key, given.get(key)]));
}

export function writeAddress(values) {
  const given = new URLSearchParams();
  for (const key of KEYS) if (values[key] !== null && values[key] !== "") given.set(key, values[key]);
  try {
    window.history.replaceState(null, "", `#${given}`);
  } catch {
    // A frame that has no address of its own, such as that of a notebook, shows the page all the same.
  }
}
