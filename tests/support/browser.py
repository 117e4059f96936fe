"""A browser that shows the page of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.pipeline.tools.report import write_page

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = ("--headless=new", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run")
# What the pages do not need takes a quarter of the browser's time.
WITHOUT = ("software-rasterizer", "extensions", "background-networking", "component-update", "sync")


def started() -> Iterator[Any]:
    """The driver of a browser, which runs until the tests end."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="selenium is not installed: the extra `dev` has it"
    )
    if not BROWSER or not DRIVER:
        pytest.skip("needs chromium and chromedriver on PATH (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in (*FLAGS, "--in-process-gpu", *(f"--disable-{part}" for part in WITHOUT)):
        options.add_argument(flag)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # otherwise chromium refuses root
    # Without a path to a driver, selenium would try to download one.
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


def looked_at(driver: Any, folder: Path) -> Iterator[Callable[..., Page]]:
    """Return a function that opens a run's page. At the end of the test the console must be empty."""

    def open_page(run, *, width=1200, motion="no-preference", address=""):
        write_page(run, folder / "page.html")
        page = Page(driver)
        page.show_as("light", motion)
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        driver.get("about:blank")  # else a new fragment of the address loads nothing
        driver.get((folder / "page.html").as_uri() + address)
        return page

    yield open_page
    assert driver.get_log("browser") == []


class Page:
    def __init__(self, driver):
        self.driver = driver

    def show_as(self, scheme, motion="no-preference"):
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        media += [{"name": "prefers-reduced-motion", "value": motion}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def one(self, selector):
        (found,) = self.all(selector)
        return found

    def count(self, selector):
        return self.driver.execute_script("return document.querySelectorAll(arguments[0]).length", selector)

    def seen(self, selector):
        """The visible text of the only element that matches."""
        script = "const [e, ...more] = document.querySelectorAll(arguments[0]); "
        script += "return [e.checkVisibility() ? e.innerText : '', more.length]"
        text, more = self.driver.execute_script(script, selector)
        assert not more, selector
        return text.strip()

    def texts(self, selector):
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)"
        return self.driver.execute_script(script, selector)

    def values(self, selector, name):
        script = (
            "return [...document.querySelectorAll(arguments[0])].map((e) => e.getAttribute(arguments[1]))"
        )
        return self.driver.execute_script(script, selector, name)

    def css(self, selector, name):
        styles = "[...document.querySelectorAll(arguments[0])].map((e) => getComputedStyle(e))"
        return self.driver.execute_script(f"return {styles}.map((e) => e[arguments[1]])", selector, name)

    def click(self, selector):
        """Find and click an element in one call, because a live page may reload in between."""
        self.driver.execute_script("document.querySelector(arguments[0]).click()", selector)

    def choose(self, control, value):
        script = "const e = document.getElementById(arguments[0]); e.value = arguments[1]; "
        self.driver.execute_script(script + "e.dispatchEvent(new Event('change'))", control, value)

    def open(self, selector):
        script = "for (const e of document.querySelectorAll(arguments[0])) e.open = true"
        self.driver.execute_script(script, selector)
        ready = "return [...document.querySelectorAll(arguments[0])].every((e) => e.childElementCount > 1)"
        for _ in range(50):
            if self.driver.execute_script(ready, selector):
                return
        raise AssertionError(f"{selector} stayed empty")


CONTRAST = """
// The least contrast of all text by WCAG 2: (L1 + 0.05) / (L2 + 0.05), over what lies behind it.
const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
const rgb = (colour) => {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
const light = (c) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(c[i] / 255), 0);
const behind = (e) => {
  const piece = e.closest(".piece");
  if (piece) return rgb(getComputedStyle(piece.querySelector("rect")).fill);
  for (let at = e; at; at = at.parentElement) {
    const c = rgb(getComputedStyle(at).backgroundColor);
    if (c[3] === 255) return c;
  }
  return rgb("white");
};
const found = [];
for (const e of document.querySelectorAll("body *")) {
  const own = [...e.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
  if (!own || !e.checkVisibility() || e.matches("script, style, noscript, option, button:disabled")) continue;
  const colour = rgb(e instanceof SVGElement ? getComputedStyle(e).fill : getComputedStyle(e).color);
  const [a, b] = [light(colour), light(behind(e))].sort((x, y) => y - x);
  const name = `${e.tagName} ${e.getAttribute("class")} ${e.textContent.slice(0, 40)}`;
  found.push([(a + 0.05) / (b + 0.05), name]);
}
return found;
"""
