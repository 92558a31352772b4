'use strict';

/* Texts in panes that scroll: words that are pointed at, one of which has the focus. */

/** The words of a text, and the sentences they are in. */
class Pane {
  /** `act(kind, index)` is told "point" and "keep", of a word. */
  constructor(holder, { labels, joined, breaks, marks, direction, sentences }, side, act) {
    this.side = side;
    this.labels = labels;
    this.direction = direction;
    this.sentences = labels.map(() => 0); // of each word the sentence
    for (const begin of sentences.slice(1)) for (let i = begin; i < labels.length; i++) this.sentences[i] += 1;
    this.hasSentences = sentences.length > 0 && sentences.length < labels.length;
    this.reachable = 0;
    this.colours = labels.map(() => '');
    this.current = [];
    this.elements = labels.map((label, index) => this.element(label, index));
    for (const index of joined) this.elements[index].classList.add('joined');
    for (const index of marks) this.elements[index].classList.add('mark');
    const flow = make('div', { className: 'flow', dir: direction });
    const ends = new Set(breaks);
    this.elements.forEach((element, index) => {
      flow.append(element);
      if (ends.has(index)) flow.append(make('br'));
    });
    holder.replaceChildren(flow);
    this.reach(0);
    this.act = act;
  }

  element(label, index) {
    const element = makeToken('', label);
    element.dataset.index = index;
    element.dir = 'auto';
    element.tabIndex = -1;
    element.setAttribute('role', 'button');
    element.setAttribute('aria-pressed', 'false');
    return element;
  }

  /** The words that stand in one sentence with this one. */
  sentenceOf(index) {
    return this.where((i) => this.sentences[i] === this.sentences[index]);
  }

  where(belongs) {
    return this.labels.map((_, i) => i).filter(belongs);
  }

  /** What some words read. */
  read(indices) {
    const glued = (i) => this.elements[i].classList.contains('joined');
    return indices.map((i, n) => (n && !glued(i) ? ' ' : '') + this.labels[i]).join('');
  }

  /** Let a holder's handlers tell the pane that is in it of what happens to its words. */
  static listen(holder, pane) {
    const indexOf = (event) => {
      const element = event.target.closest('.token');
      return element ? Number(element.dataset.index) : null;
    };
    const tell = (kind) => (event) => {
      const index = indexOf(event);
      if (index === null) return;
      if (kind === 'keep') pane().reach(index);
      pane().act(kind, pane().side, index);
    };
    holder.addEventListener('pointerover', (event) => {
      if (event.pointerType !== 'touch') tell('point')(event);
    });
    holder.addEventListener('click', tell('keep'));
    holder.addEventListener('focusin', (event) => {
      if (event.target.matches(':focus-visible')) tell('point')(event);
    });
    holder.addEventListener('keydown', (event) => {
      const index = indexOf(event);
      if (index !== null && pane().press(event.key, index)) event.preventDefault();
    });
  }

  /** What a key does on a word; whether it did anything. */
  press(key, index) {
    const last = this.elements.length - 1;
    const [forward, backward] = this.direction === 'rtl' ? ['ArrowLeft', 'ArrowRight'] : ['ArrowRight', 'ArrowLeft'];
    if (key === forward) this.focus(Math.min(last, index + 1));
    else if (key === backward) this.focus(Math.max(0, index - 1));
    else if (key === 'ArrowDown') this.focus(this.beside(index, 1));
    else if (key === 'ArrowUp') this.focus(this.beside(index, -1));
    else if (key === 'Home') this.focus(0);
    else if (key === 'End') this.focus(last);
    else if (key === 'Enter' || key === ' ') this.act('keep', this.side, index);
    else return false;
    return true;
  }

  /** The word in the line above (-1) or below (1) that lies nearest. */
  beside(index, step) {
    const from = this.elements[index].getBoundingClientRect();
    const middle = from.left + from.width / 2;
    let [best, distance, line] = [index, Infinity, null];
    for (let i = index + step; i >= 0 && i < this.elements.length; i += step) {
      const box = this.elements[i].getBoundingClientRect();
      if (Math.abs(box.top - from.top) < box.height / 2) continue;
      if (line !== null && Math.abs(box.top - line) > box.height / 2) break;
      line = box.top;
      const apart = Math.abs(box.left + box.width / 2 - middle);
      if (apart < distance) [best, distance] = [i, apart];
    }
    return best;
  }

  /** Make this word the one that Tab comes to. */
  reach(index) {
    this.elements[this.reachable].tabIndex = -1;
    this.reachable = index;
    this.elements[index].tabIndex = 0;
  }

  focus(index) {
    this.reach(index);
    this.elements[index].focus();
  }

  /** Scroll a word into view, and mark it until another is. */
  find(index) {
    for (const element of document.querySelectorAll('.found')) element.classList.remove('found');
    this.elements[index].classList.add('found');
    this.elements[index].scrollIntoView({ block: 'nearest' });
  }

  /** Colour the words by values, or by nothing, and mark those that are chosen, or kept. */
  paint(values, largest, current, kept) {
    this.elements.forEach((element, index) => {
      const colour = values ? tint(values[index], largest) : '';
      if (this.colours[index] !== colour) element.style.backgroundColor = colour;
      this.colours[index] = colour;
    });
    for (const index of this.current) {
      this.elements[index].classList.remove('current');
      this.elements[index].setAttribute('aria-pressed', 'false');
    }
    this.current = current;
    for (const index of current) {
      this.elements[index].classList.add('current');
      if (kept) this.elements[index].setAttribute('aria-pressed', 'true');
    }
  }
}
