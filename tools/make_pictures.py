"""Take pictures of a page at three widths, light and dark, at full height.

    python tools/make_pictures.py outputs/…/report.html pictures [--open] [--panel strip]
    python tools/make_pictures.py outputs/…/report.html docs/images --as page.png --widths 1280 \\
        --schemes light --height 1150

Needs the extra `dev` (selenium), and chromium with chromedriver on PATH.
"""

from __future__ import annotations

import argparse
import base64
import os
import shutil
from pathlib import Path
from typing import Any

WIDTHS = (1280, 800, 360)
SCHEMES = ("light", "dark")
FLAGS = ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run")


def browser() -> Any:
    """A chromium without a window.

    Raises:
        SystemExit: no chromium is installed.
    """
    from selenium import webdriver

    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    binary, driver = next(filter(None, found), None), shutil.which("chromedriver")
    if binary is None or driver is None:
        raise SystemExit("needs chromium and chromedriver on PATH (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in FLAGS:
        options.add_argument(flag)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # otherwise chromium does not start as root
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=driver))


def take(
    driver: Any,
    page: Path,
    *,
    width: int,
    scheme: str,
    opened: bool = False,
    panel: str | None = None,
    height: int | None = None,
) -> bytes:
    """Take a PNG of a page, or of one of its panels, at full height or the first `height` pixels."""
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    driver.get(page.resolve().as_uri())
    if opened:  # the group first: an opened group adds its rollouts to the page
        for kind in ("group", "rollout"):
            driver.execute_script(f"document.querySelector('details.{kind} > summary')?.click()")
    of = "document.getElementById(arguments[0])" if panel else "document.documentElement"
    box = driver.execute_script(
        f"const b = {of}.getBoundingClientRect(); return [b.x + scrollX, b.y + scrollY, b.width, b.height]",
        panel,
    )
    clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
    clip["height"] = min(clip["height"], height or clip["height"])
    options = {"captureBeyondViewport": True, "clip": clip}
    return base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", options)["data"])


def main() -> None:
    """Write `<page>-<width>-<scheme>.png` for each width and scheme."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("page", type=Path, help="report.html")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    parser.add_argument("--name", help="start of the file names; default: the name of the page's folder")
    parser.add_argument("--as", dest="file", help="the whole name, if there is only one picture")
    parser.add_argument("--height", type=int, help="number of pixels from the top; default: all")
    parser.add_argument("--open", action="store_true", help="open the first group and its first rollout")
    parser.add_argument("--panel", help="take only the panel with this id")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES, choices=SCHEMES)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    name = given.name or given.page.resolve().parent.name
    driver = browser()
    try:
        for width in given.widths:
            for scheme in given.schemes:
                options = {"width": width, "scheme": scheme, "opened": given.open, "panel": given.panel}
                options["height"] = given.height
                path = given.folder / (given.file or f"{name}-{width}-{scheme}.png")
                path.write_bytes(take(driver, given.page, **options))
                print(path)
    finally:
        driver.quit()


if __name__ == "__main__":
    main()
