'use strict';

/* Token-to-token maps; packing.py packs the bytes. */

/** The integer that stands for the largest value. */
const STEPS = 127;

/** One layer's map; its bytes are read when the map is first shown. */
class LayerMap {
  constructor(facts) {
    this.facts = facts;
    this.size = facts.size;
    this.kept = facts.kept;
    this.whole = facts.kept === facts.size;
    this.parts = null;
  }

  read() {
    if (this.parts) return this.parts;
    const bytes = BLOCKS[this.facts.block];
    const { size, kept } = this;
    const cells = this.whole && this.facts.cell === 1 ? 0 : this.facts.side ** 2;
    let at = 0;
    const next = (kind, count) => {
      const end = at + count * kind.BYTES_PER_ELEMENT;
      const part = new kind(bytes.buffer.slice(at, end));
      at = end;
      return part;
    };
    this.parts = {
      scales: next(Float32Array, size),
      shares: next(Float32Array, size),
      columns: this.whole ? null : next(Uint16Array, size * kept),
      overview: next(Int8Array, cells),
      values: next(Int8Array, size * kept),
    };
    return this.parts;
  }

  /** Return the map's row i: how much token i receives from each token. */
  row(i) {
    const { scales, columns, values } = this.read();
    const row = new Float32Array(this.size);
    const unit = scales[i] / STEPS;
    for (let k = 0, at = i * this.kept; k < this.kept; k++, at++) {
      row[columns ? columns[at] : k] = values[at] * unit;
    }
    return row;
  }

  /** Return the map's column j: how much each token receives from token j. */
  column(j) {
    const { scales, columns, values } = this.read();
    const column = new Float32Array(this.size);
    for (let i = 0; i < this.size; i++) {
      const start = i * this.kept;
      if (!columns) {
        column[i] = values[start + j] * scales[i] / STEPS;
        continue;
      }
      for (let at = start; at < start + this.kept; at++) {
        if (columns[at] === j && values[at]) column[i] = values[at] * scales[i] / STEPS;
      }
    }
    return column;
  }

  /** Return the stored share of row i's absolute sum. */
  share(i) {
    return this.read().shares[i];
  }

  /** Return the overview's cells as shares of the map's largest entry. */
  overview() {
    const { overview, values, scales } = this.read();
    if (overview.length) return Float32Array.from(overview, (value) => value / STEPS);
    const largest = largestOf(scales) || 1; // it is the map itself
    return Float32Array.from(values, (value, at) => ((value / STEPS) * scales[Math.floor(at / this.size)]) / largest);
  }
}

/** Return the largest absolute value; null is ignored. */
function largestOf(values) {
  let largest = 0;
  for (const value of values) if (value !== null) largest = Math.max(largest, Math.abs(value));
  return largest;
}

/** The entry that is largest in absolute value, with its sign; 0 if there is none. */
function strongestOf(values) {
  let best = 0;
  for (const value of values) if (Math.abs(value) > Math.abs(best)) best = value;
  return best;
}

/** The indices of the entries that are largest in absolute value and not zero, largest first. */
function strongest(values, count) {
  const indices = [];
  for (let i = 0; i < values.length; i++) if (values[i]) indices.push(i);
  indices.sort((a, b) => Math.abs(values[b]) - Math.abs(values[a]));
  return indices.slice(0, count);
}

/** Sum the values; null is ignored. */
const sumOf = (values) => values.reduce((sum, value) => sum + (value ?? 0), 0);
