"use strict";
// The filters. Without this script all of the page is shown.
//
// An element has what it is about in data-direction, data-d, data-mask, data-path, data-dtype and data-who. It is shown
// when each of these that it has is wanted. A holder is shown while a leaf, a row or a picture, is shown in it. The
// state is kept in the address after the #, so that a link shows the same view.
(() => {
  const box = document.getElementById("filters");
  const form = box.querySelector("form");
  const selects = [...form.querySelectorAll("select")];
  const boxes = [...form.querySelectorAll("input[name=who]")];
  const items = [...document.querySelectorAll("main :is([data-direction], [data-d], [data-mask], [data-path], [data-dtype], [data-who])")];
  const leaves = [...document.querySelectorAll("[data-leaf]")];
  const holders = [...document.querySelectorAll("[data-holder]")].reverse(); // inner ones first
  const isShown = (element) => !element.closest(".out");

  function apply() {
    const hidden = new Set(boxes.filter((one) => !one.checked).map((one) => one.value));
    const wanted = selects.filter((one) => one.value);
    for (const holder of holders) holder.classList.remove("out");
    for (const item of items) {
      const differs = wanted.some((one) => (item.dataset[one.name] ?? one.value) !== one.value);
      item.classList.toggle("out", differs || hidden.has(item.dataset.who));
    }
    for (const leaf of leaves.filter((leaf) => leaf.dataset.leaf === "picture")) {
      leaf.classList.toggle("out", !leaf.querySelector("[data-who]:not(.out)"));
    }
    for (const holder of holders) {
      if (![...holder.querySelectorAll("[data-leaf]")].some(isShown)) holder.classList.add("out");
    }
    for (const section of document.querySelectorAll("main > section")) {
      const own = [...section.querySelectorAll("[data-leaf]")];
      const nothing = section.querySelector(".nothing");
      if (nothing) nothing.hidden = own.length === 0 || own.some(isShown);
    }
    document.querySelectorAll("svg.bars").forEach(closeRanks);
    document.getElementById("shown").textContent = ["picture", "row"].map(counted).join(", ");
  }

  function counted(kind) {
    const all = leaves.filter((leaf) => leaf.dataset.leaf === kind);
    return `${all.filter(isShown).length}/${all.length} ${kind}s`;
  }

  // Bars that are shown move up to where those before them are hidden.
  function closeRanks(svg) {
    const rows = [...svg.querySelectorAll(".bar")];
    const places = rows.map((row) => (row.dataset.place ??= row.getAttribute("transform").match(/ ([\d.]+)\)/)[1]));
    const shown = rows.filter((row) => !row.classList.contains("out"));
    shown.forEach((row, i) => row.setAttribute("transform", `translate(0 ${places[i]})`));
    const height = (svg.dataset.height ??= svg.viewBox.baseVal.height);
    const step = rows.length > 1 ? places[1] - places[0] : 0;
    svg.setAttribute("viewBox", `0 0 ${svg.viewBox.baseVal.width} ${height - step * (rows.length - shown.length)}`);
  }

  function write() {
    const state = new URLSearchParams();
    for (const one of selects) if (one.value) state.set(one.name, one.value);
    const hidden = boxes.filter((one) => !one.checked).map((one) => one.value);
    if (hidden.length) state.set("hide", hidden.join(","));
    const text = state.toString();
    history.replaceState(null, "", text ? `#${text}` : location.pathname + location.search);
  }

  function read() {
    const state = new URLSearchParams(location.hash.slice(1));
    for (const one of selects) {
      const value = state.get(one.name) ?? "";
      one.value = [...one.options].some((option) => option.value === value) ? value : "";
    }
    const hidden = (state.get("hide") ?? "").split(",");
    for (const one of boxes) one.checked = !hidden.includes(one.value);
    apply();
  }

  // What is scrolled to comes to lie below the filters, which stay at the top.
  function makeRoom() {
    document.documentElement.style.scrollPaddingTop = `${box.offsetHeight + 16}px`;
  }

  form.addEventListener("change", () => { write(); apply(); });
  form.addEventListener("reset", () => setTimeout(() => { write(); apply(); }));
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", read);
  new ResizeObserver(makeRoom).observe(box);
  // A link within the page scrolls, and leaves the state in the address alone.
  for (const link of document.querySelectorAll("a[href^='#']")) {
    link.addEventListener("click", (event) => {
      event.preventDefault();
      document.querySelector(link.getAttribute("href")).scrollIntoView();
    });
  }
  box.hidden = false;
  box.open = window.innerWidth >= 720;
  read();
})();
