// What differs between two texts, word by word.
const MOST = 4e6;

// Parts in order: [0, text] in both, [-1, text] in the first alone, [1, text] in the second alone.
export function wordDiff(first, second) {
  const a = first.split(/(\s+)/).filter(Boolean), b = second.split(/(\s+)/).filter(Boolean);
  let start = 0, endA = a.length, endB = b.length;
  while (start < endA && start < endB && a[start] === b[start]) start++;
  while (endA > start && endB > start && a[endA - 1] === b[endB - 1]) { endA--; endB--; }
  const parts = [], add = (kind, text) => { if (text) parts.at(-1)?.[0] === kind ? parts.at(-1)[1] += text : parts.push([kind, text]); };
  add(0, a.slice(0, start).join(""));
  const x = a.slice(start, endA), y = b.slice(start, endB), width = y.length + 1;
  if (x.length * y.length > MOST) { add(-1, x.join("")); add(1, y.join("")); }
  else {
    const common = new Uint16Array((x.length + 1) * width);  // of the rests from each pair of places on
    for (let i = x.length - 1; i >= 0; i--) for (let j = y.length - 1; j >= 0; j--)
      common[i * width + j] = x[i] === y[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    let i = 0, j = 0;
    while (i < x.length || j < y.length) {
      if (i < x.length && j < y.length && x[i] === y[j]) { add(0, x[i]); i++; j++; }
      else if (j >= y.length || (i < x.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) add(-1, x[i++]);
      else add(1, y[j++]);
    }
  }
  add(0, a.slice(endA).join(""));
  return parts;
}
