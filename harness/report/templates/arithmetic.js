// The arithmetic of "How it works". It is that of common/mask.py and reference/trace.py, and is tested against them.
const attention = (() => {
  // A mask is {left, right, corner}, null for a side that is open. Query i sees the keys from i + low to i + high.
  function band(mask, lenQ, lenK) {
    const offset = mask.corner === "bottom_right" ? lenK - lenQ : 0;
    return {
      low: mask.left === null ? -Infinity : offset - mask.left,
      high: mask.right === null ? Infinity : offset + mask.right,
    };
  }

  function range(begin, end) {
    return begin < end ? [begin, end] : [0, 0];
  }

  // The keys that some query of the rows sees: the first row sees the first of them, the last row the last.
  function keyRange(mask, rowBegin, rowEnd, lenQ, lenK) {
    const { low, high } = band(mask, lenQ, lenK);
    const lastRow = Math.min(rowEnd, lenQ) - 1;
    return range(Math.max(0, rowBegin + low), Math.min(lenK, lastRow + high + 1));
  }

  // The keys that every query of the rows sees.
  function fullKeyRange(mask, rowBegin, rowEnd, lenQ, lenK) {
    const { low, high } = band(mask, lenQ, lenK);
    const lastRow = Math.min(rowEnd, lenQ) - 1;
    return range(Math.max(0, lastRow + low), Math.min(lenK, rowBegin + high + 1));
  }

  function tileKind(mask, rowBegin, rowEnd, keyBegin, keyEnd, lenQ, lenK) {
    const [begin, end] = keyRange(mask, rowBegin, rowEnd, lenQ, lenK);
    if (Math.max(begin, keyBegin) >= Math.min(end, keyEnd)) return "skip";
    const [fullBegin, fullEnd] = fullKeyRange(mask, rowBegin, rowEnd, lenQ, lenK);
    return fullBegin <= keyBegin && keyEnd <= fullEnd ? "full" : "edge";
  }

  // The kinds of all tiles of scores: a list for each query tile, in the order of the keys.
  function tileKinds(mask, lenQ, lenK, blockM, blockN) {
    const begins = (length, block) => Array.from({ length: Math.ceil(length / block) }, (_, i) => i * block);
    return begins(lenQ, blockM).map((row) =>
      begins(lenK, blockN).map((key) => tileKind(mask, row, row + blockM, key, key + blockN, lenQ, lenK)));
  }

  // The online softmax of a row that sees all its keys: its state after each tile. All that is kept is fp32.
  function softmaxSteps(scores, values, blockN) {
    const f32 = Math.fround;
    const steps = [];
    let rowMax = -Infinity, rowSum = 0, acc = 0;
    for (let begin = 0; begin < scores.length; begin += blockN) {
      const tile = scores.slice(begin, begin + blockN).map(f32);
      const tileMax = Math.max(...tile);
      const newMax = Math.max(rowMax, tileMax);
      const rescale = f32(Math.exp(rowMax - newMax));
      const p = tile.map((score) => f32(Math.exp(score - newMax)));
      const tileSum = p.reduce((sum, x) => f32(sum + x), 0);
      const tileAcc = p.reduce((sum, x, i) => f32(sum + x * f32(values[begin + i])), 0);
      rowSum = f32(rowSum * rescale + tileSum);
      acc = f32(acc * rescale + tileAcc);
      steps.push({
        begin, end: begin + tile.length, tileMax, oldMax: rowMax, rowMax: newMax, rescale, tileSum, rowSum,
        output: f32(acc / rowSum),
      });
      rowMax = newMax;
    }
    return steps;
  }

  // The softmax of all scores at once, in float64.
  function plainSoftmax(scores, values) {
    const rounded = scores.map(Math.fround);
    const largest = Math.max(...rounded);
    const p = rounded.map((score) => Math.exp(score - largest));
    const sum = p.reduce((a, b) => a + b, 0);
    return p.reduce((total, x, i) => total + (x / sum) * Math.fround(values[i]), 0);
  }

  // Bytes of Q, K, V and O, and of S and P, of one head.
  function memory(lenQ, lenK, headDim, itemsize) {
    return { tensors: 2 * (lenQ + lenK) * headDim * itemsize, square: 2 * lenQ * lenK * itemsize };
  }

  // Standard normal numbers of a seed, to two decimals: Lehmer's generator of uniform ones, Box and Muller's transform.
  function normals(count, seed) {
    const modulus = 2 ** 31 - 1;
    let state = (seed % (modulus - 1)) + 1;
    function uniform() {
      state = (state * 48271) % modulus;
      return state / modulus;
    }
    uniform(); // the first one of a small seed is small
    return Array.from({ length: count }, () => {
      const radius = Math.sqrt(-2 * Math.log(uniform()));
      return Math.round(100 * radius * Math.cos(2 * Math.PI * uniform())) / 100;
    });
  }

  return { keyRange, tileKinds, softmaxSteps, plainSoftmax, memory, normals };
})();
