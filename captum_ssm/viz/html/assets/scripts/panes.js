'use strict';

/* Texts in scrolling panes, whose words react to pointer and keys. */

/** The words of a text, and their sentences. */
class Pane extends TokenLines {
  /** `act(kind, side, index)` is called with "point" or "keep" for a word. */
  constructor(holder, { labels, joined, breaks, marks, direction, sentences }, side, act) {
    super(direction);
    this.side = side;
    this.labels = labels;
    this.sentences = labels.map(() => 0); // of each word the sentence
    for (const begin of sentences.slice(1)) for (let i = begin; i < labels.length; i++) this.sentences[i] += 1;
    this.hasSentences = sentences.length > 0 && sentences.length < labels.length;
    this.colors = labels.map(() => '');
    this.current = [];
    labels.forEach((label) => this.add(label, ''));
    this.join(joined, marks);
    holder.replaceChildren(this.lay(labels.keys(), joined, breaks));
    this.reach(0);
    this.act = act;
  }

  /** Return the words of a word's sentence. */
  sentenceOf(index) {
    return this.where((i) => this.sentences[i] === this.sentences[index]);
  }

  where(belongs) {
    return this.labels.map((_, i) => i).filter(belongs);
  }

  /** Return the text of some words. */
  read(indices) {
    const glued = (i) => this.elements[i].classList.contains('joined');
    return indices.map((i, n) => (n && !glued(i) ? ' ' : '') + this.labels[i]).join('');
  }

  /** Listen to a holder's events, and pass them to its present pane. */
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

  /** Handle a key on a word; return true if the key has an effect. */
  press(key, index) {
    if (key !== 'Enter' && key !== ' ') return this.go(key, index);
    this.act('keep', this.side, index);
    return true;
  }

  /** Scroll a word into view, and mark only this word. */
  find(index) {
    for (const element of document.querySelectorAll('.found')) element.classList.remove('found');
    this.elements[index].classList.add('found');
    this.elements[index].scrollIntoView({ block: 'nearest' });
  }

  /** Color the words by values or not at all, and mark chosen and kept words. */
  paint(values, largest, current, kept) {
    this.elements.forEach((element, index) => {
      const color = values ? tint(values[index], largest) : '';
      if (this.colors[index] !== color) element.style.backgroundColor = color;
      this.colors[index] = color;
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
