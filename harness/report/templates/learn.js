// How it works, by hand: the steps of the online softmax, the tiles of a mask, the bytes of S and P. Without this script
// the tables of `harness trace` stand in its place. What is computed is in arithmetic.js.
(() => {
  const SCORES_MOST = 64;
  const LARGEST = 1e30; // of a number that is typed: sums stay in fp32
  const SIGNS = { full: "█", edge: "▒", skip: "·" };

  const number = (value) =>
    Number.isFinite(value) ? String(Number(value.toPrecision(5))).replace("-", "−") : value < 0 ? "−∞" : "∞";
  const span = (begin, end) => `${begin}..${end - 1}`;

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children);
    return made;
  }

  // A part of the page: what is in it by selector, its controls by name.
  function lab(id) {
    const root = document.getElementById(id);
    root.hidden = false;
    const find = (selector) => root.querySelector(selector);
    return { find, control: (name) => find(`[name=${name}]`), all: (selector) => [...root.querySelectorAll(selector)] };
  }

  // A slider's number stands beside its name.
  function label(slider, text = slider.value) {
    slider.parentElement.querySelector("b").textContent = text;
  }

  // A number that is typed, within its limits.
  function whole(input) {
    const value = Math.round(Number(input.value)) || 0;
    return Math.min(Math.max(value, Number(input.min)), Number(input.max));
  }

  function softmaxLab() {
    const { find, control } = lab("softmax");
    const typed = { scores: control("scores"), values: control("values") };
    const keys = control("len_k"), block = control("block_n");
    let scores, values, steps, done;

    // The numbers of a list, or an error in words.
    function numbers(input) {
      const parts = input.value.split(",").map((part) => part.trim());
      const wrong = parts.find((part) => part === "" || !(Math.abs(Number(part)) <= LARGEST));
      if (wrong !== undefined) {
        throw new RangeError(`Write numbers from −1e30 to 1e30 with commas between them; “${wrong}” is none.`);
      }
      if (parts.length > SCORES_MOST) throw new RangeError(`Write at most ${SCORES_MOST} numbers, not ${parts.length}.`);
      return parts.map(Number);
    }

    function read() {
      let input = typed.scores;
      for (const one of Object.values(typed)) one.removeAttribute("aria-invalid");
      find(".wrong").textContent = "";
      try {
        const given = numbers(input);
        input = typed.values;
        const weighed = input.value.trim() ? numbers(input) : given.map((_, key) => key);
        if (weighed.length !== given.length) {
          throw new RangeError(`${given.length} scores need as many values, not ${weighed.length}.`);
        }
        [scores, values] = [given, weighed];
      } catch (error) {
        if (!(error instanceof RangeError)) throw error;
        input.setAttribute("aria-invalid", "true");
        find(".wrong").textContent = error.message;
        return;
      }
      keys.value = scores.length;
      label(keys, scores.length);
      label(block);
      steps = attention.softmaxSteps(scores, values, Number(block.value));
      go(0);
    }

    function random() {
      typed.scores.value = attention.normals(Number(keys.value), whole(control("seed"))).join(",");
      typed.values.value = "";
      read();
    }

    function words() {
      if (done === 0) return `Before the first of ${steps.length} tiles: row_max = −∞, row_sum = 0, output = 0.`;
      const { begin, end, oldMax, rowMax, rescale, tileSum, rowSum, output } = steps[done - 1];
      const before = done > 1 ? number(steps[done - 2].rowSum) : "0";
      const moved = rowMax > oldMax ? `rises from ${number(oldMax)} to ${number(rowMax)}` : `stays ${number(rowMax)}`;
      let text = `Tile ${done} of ${steps.length}, keys ${span(begin, end)}: row_max ${moved}, so rescale = ${number(rescale)}. ` +
        `row_sum = ${before} · ${number(rescale)} + ${number(tileSum)} = ${number(rowSum)}; output ${number(output)}.`;
      if (done === steps.length) {
        const plain = attention.plainSoftmax(scores, values);
        text += ` The plain softmax of all scores at once, in float64, gives ${number(plain)}: ` +
          `error ${Math.abs(output - plain).toExponential(1).replace("-", "−")}; the steps are in fp32.`;
      }
      return text;
    }

    function go(to) {
      done = to;
      find(".scores").replaceChildren(...steps.map(({ begin, end }, i) => {
        const state = i === done - 1 ? "now" : i < done - 1 ? "seen" : "";
        const item = element("li", state, ...scores.slice(begin, end).map((score) => element("span", "", number(score))));
        if (state === "now") item.setAttribute("aria-current", "step");
        return item;
      }));
      find("tbody").replaceChildren(...steps.slice(0, done).map((step, i) => {
        const { begin, end, tileMax, rowMax, rescale, rowSum, output } = step;
        return element("tr", i === done - 1 ? "now" : "",
          element("td", "label", span(begin, end)),
          element("td", "few", scores.slice(begin, end).map(number).join(" ")),
          element("td", "few", number(tileMax)),
          ...[rowMax, rescale, rowSum, output].map((value) => element("td", "", number(value))));
      }));
      find(".said").textContent = words();
      // aria-disabled, not disabled: the button that was pressed keeps the focus.
      for (const [name, ends] of [["step", done === steps.length], ["back", done === 0], ["reset", done === 0]]) {
        control(name).setAttribute("aria-disabled", ends);
      }
      const weighed = typed.values.value.trim() ? ` --values=${values.join(",")}` : "";
      find(".command").textContent = `harness trace --scores=${scores.join(",")}${weighed}` +
        ` --block-m ${scores.length} --block-n ${block.value} --mask full`;
    }

    control("step").addEventListener("click", () => go(Math.min(done + 1, steps.length)));
    control("back").addEventListener("click", () => go(Math.max(done - 1, 0)));
    control("reset").addEventListener("click", () => go(0));
    control("random").addEventListener("click", random);
    keys.addEventListener("input", random);
    block.addEventListener("input", read);
    for (const input of Object.values(typed)) input.addEventListener("input", read);
    read();
  }

  function tilesLab() {
    const { find, control, all } = lab("tiles");
    const sliders = ["len_q", "len_k", "block_m", "block_n"].map(control);
    const grid = find(".walks");
    let row = Number(grid.dataset.row), kinds, lengths;

    function mask() {
      const name = control("mask").value;
      if (name === "window") return { left: whole(control("left")), right: whole(control("right")), corner: "bottom_right" };
      return { left: null, right: name === "full" ? null : 0, corner: name === "causal-topleft" ? "top_left" : "bottom_right" };
    }

    function count(some) {
      const of = (kind) => some.filter((one) => one === kind).length;
      return `${some.length - of("skip")} visited (${of("full")} full, ${of("edge")} edge), ${of("skip")} skipped`;
    }

    function queries(i) {
      return span(i * lengths.blockM, Math.min((i + 1) * lengths.blockM, lengths.lenQ));
    }

    function draw() {
      sliders.forEach((slider) => label(slider));
      for (const name of ["left", "right"]) control(name).disabled = control("mask").value !== "window";
      const [lenQ, lenK, blockM, blockN] = sliders.map((slider) => Number(slider.value));
      lengths = { lenQ, lenK, blockM, blockN };
      kinds = attention.tileKinds(mask(), lenQ, lenK, blockM, blockN);
      grid.style.setProperty("--columns", kinds[0].length);
      grid.replaceChildren(...kinds.map((walk, i) => {
        const signs = element("span", "walk", ...walk.map((kind) => element("i", `tile ${kind}`, SIGNS[kind])));
        signs.setAttribute("aria-hidden", "true");
        const option = element("div", "", element("span", "span", queries(i)), signs);
        option.id = `query-tile-${i}`;
        option.setAttribute("role", "option");
        option.setAttribute("aria-label", `queries ${queries(i)}: ${count(walk)}`);
        option.addEventListener("click", () => choose(i));
        return option;
      }));
      find(".tally").textContent = `${kinds.length} × ${kinds[0].length} tiles: ${count(kinds.flat())}.`;
      choose(row);
    }

    // The tiles one after the other, neighbours of a kind as one.
    function inWords(walk) {
      const runs = [];
      walk.forEach((kind, i) => {
        if (runs.at(-1)?.kind === kind) runs.at(-1).end = i + 1;
        else runs.push({ kind, begin: i, end: i + 1 });
      });
      return runs.map(({ kind, begin, end }) => {
        const keys = span(begin * lengths.blockN, Math.min(end * lengths.blockN, lengths.lenK));
        return `${kind}${end - begin > 1 ? ` ×${end - begin}` : ""} (keys ${keys})`;
      }).join(", ");
    }

    function choose(i) {
      row = Math.min(Math.max(i, 0), kinds.length - 1);
      [...grid.children].forEach((option, j) => option.setAttribute("aria-selected", j === row));
      grid.setAttribute("aria-activedescendant", `query-tile-${row}`);
      const { lenQ, lenK, blockM, blockN } = lengths;
      const [begin, end] = attention.keyRange(mask(), row * blockM, (row + 1) * blockM, lenQ, lenK);
      const sees = begin < end ? `sees the keys ${span(begin, end)}` : "sees no key: o = 0, lse = −∞";
      find(".said").textContent = `The query tile ${queries(row)} ${sees}. Its walk: ${inWords(kinds[row])}.`;
      const { left, right } = mask(), name = control("mask").value;
      const options = name === "window" ? `window --left ${left} --right ${right}` : name.replace("-topleft", " --corner top-left");
      find(".command").textContent = `harness trace --len-q ${lenQ} --len-k ${lenK} --block-m ${blockM} --block-n ${blockN}` +
        ` --row ${row * blockM} --mask ${options}`;
    }

    grid.addEventListener("keydown", (event) => {
      const to = { ArrowDown: row + 1, ArrowUp: row - 1, Home: 0, End: kinds.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      choose(to);
    });
    for (const input of all("input, select")) input.addEventListener("input", draw);
    draw();
  }

  function bytesLab() {
    const { find, control, all } = lab("bytes");
    const unit = (bytes) => {
      const power = Math.min(Math.floor(Math.log2(bytes) / 10), 4);
      return `${Number((bytes / 1024 ** power).toPrecision(4))} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
    };

    function draw() {
      const length = 2 ** Number(control("power").value), headDim = Number(control("head_dim").value);
      const { tensors, square } = attention.memory(length, length, headDim, Number(control("itemsize").value));
      label(control("power"), length);
      control("power").setAttribute("aria-valuetext", `N ${length}`);
      for (const [name, bytes] of [["tensors", tensors], ["square", square]]) {
        find(`.${name}`).style.width = `${(100 * bytes) / Math.max(tensors, square)}%`;
        find(`.of-${name}`).textContent = `${unit(bytes)}, ${bytes.toLocaleString("en")} B`;
      }
      find(".said").textContent = `Of one head, S and P take ${number(square / tensors)} times what Q, K, V and O take. ` +
        `They grow with N², the others with N; at N = 2 D, here ${2 * headDim}, both are equal.`;
    }

    for (const input of all("input, select")) input.addEventListener("input", draw);
    draw();
  }

  softmaxLab();
  tilesLab();
  bytesLab();
  document.getElementById("worked").hidden = true;
})();
