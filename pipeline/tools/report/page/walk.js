// One stop for the tab key; the arrow keys go from dot to dot.
import { hasTip, showTip } from "./tip.js";
import { openGroup } from "./tree.js";

export function walk(svg, grid) {
  const rows = grid.filter((dots) => dots.length);
  if (!rows.length) return;
  let [i, j] = [0, 0];
  rows[0][0].setAttribute("tabindex", 0);
  const near = (dots, x) =>
    dots.reduce(
      (best, dot, k) =>
        Math.abs(dot.getAttribute("cx") - x) < Math.abs(dots[best].getAttribute("cx") - x) ? k : best,
      0,
    );
  const go = (to, at) => {
    rows[i][j].setAttribute("tabindex", -1);
    [i, j] = [to, at];
    rows[i][j].setAttribute("tabindex", 0);
  };
  svg.addEventListener("focusin", (e) =>
    rows.forEach((dots, k) =>
      dots.forEach((dot, l) => {
        if (dot === e.target) go(k, l);
      }),
    ),
  );
  svg.addEventListener("keydown", (e) => {
    const x = rows[i][j].getAttribute("cx");
    const to = {
      ArrowRight: () => [i, Math.min(j + 1, rows[i].length - 1)],
      ArrowLeft: () => [i, Math.max(j - 1, 0)],
      ArrowDown: () => (i + 1 < rows.length ? [i + 1, near(rows[i + 1], x)] : [i, j]),
      ArrowUp: () => (i ? [i - 1, near(rows[i - 1], x)] : [i, j]),
      Home: () => [0, 0],
      End: () => [rows.length - 1, 0],
    }[e.key];
    if (to) {
      e.preventDefault();
      go(...to());
      rows[i][j].focus({ preventScroll: true });
      rows[i][j].scrollIntoView({ block: "nearest" });
      showTip(rows[i][j]);
    } else if (e.key === "Enter" && hasTip(e.target)) {
      e.preventDefault(); // the summary that gets the focus would close again
      openGroup(e.target.dataset.group);
    }
  });
  svg.addEventListener("click", (e) => {
    if (hasTip(e.target)) openGroup(e.target.dataset.group);
  });
}
