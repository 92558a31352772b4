'use strict';

/* Tokens: as text, or as patches over an image; one of them has the focus. */

/** Show the image in color beside the predictions. */
function showImage(holder, image) {
  holder.replaceChildren();
  if (!image) return;
  holder.append(
    make('img', { src: image.source, alt: 'the explained image, in color' }),
  );
}

/** The tokens of one example.
 *
 * `act(kind, index)` is told "point" (index null when the pointer or focus leaves), "keep" and
 * "layer" (index +1 or -1).
 */
class TokenView extends TokenLines {
  constructor(text, picture, example, act) {
    super(example.direction);
    this.example = example;
    this.act = act;
    this.text = text;
    this.picture = picture;
    this.colors = example.tokens.map(() => ['', '']); // of each background and bar
    this.placed = new Set(); // tokens that are patches of an image, painted on its canvas
    this.canvas = null;
    text.replaceChildren();
    picture.replaceChildren();
    picture.hidden = true;
    text.dir = example.direction;
    example.tokens.forEach((token, index) => this.add(token, `token ${index}`));
    this.join(example.joined, example.marks);
    const placed = new Set();
    if (example.image) this.layPatches(placed);
    const rest = example.tokens.map((_, index) => index).filter((index) => !placed.has(index));
    if (placed.size && rest.length) {
      const said = 'Tokens without a patch, such as the class token:';
      text.append(make('p', { className: 'note' }, said));
    }
    if (rest.length) text.append(this.lay(rest, example.joined, example.breaks));
    this.reach(0);
  }

  layPatches(placed) {
    const { source, width, height, grid, cells } = this.example.image;
    this.picture.append(
      make('img', { className: 'under', src: source, width, height, alt: 'the explained image' }),
    );
    this.picture.hidden = false;
    if (!grid) return;
    this.canvas = make('canvas', { className: 'over' });
    this.canvas.setAttribute('aria-hidden', 'true'); // its patches have labels
    this.picture.append(this.canvas);
    this.placed = placed;
    const layer = make('div', { className: 'grid' });
    layer.style.gridTemplate = `repeat(${grid[0]}, 1fr) / repeat(${grid[1]}, 1fr)`;
    for (const index of cells) {
      const element = this.elements[index];
      element.setAttribute('aria-label', this.example.tokens[index]);
      element.textContent = '';
      layer.append(element);
      placed.add(index);
    }
    this.picture.append(layer);
  }

  /** Listen to a container's events, and find the token of each event. */
  static listen(container, view) {
    const indexOf = (event) => {
      const element = event.target.closest('.token');
      return element ? Number(element.dataset.index) : null;
    };
    container.addEventListener('pointerover', (event) => {
      const index = indexOf(event);
      // between tokens the last one stays
      if (index !== null && event.pointerType !== 'touch') view().act('point', index);
    });
    container.addEventListener('pointerleave', () => view().act('point', null));
    container.addEventListener('click', (event) => {
      const index = indexOf(event);
      if (index === null) return;
      view().reach(index);
      view().act('keep', index);
      if (event.pointerType === 'touch') view().act('point', index); // no pointer hovers
    });
    container.addEventListener('focusin', (event) => {
      const index = indexOf(event);
      if (index === null) return;
      view().reach(index);
      if (event.target.matches(':focus-visible')) view().act('point', index);
    });
    container.addEventListener('focusout', () => view().act('point', null));
    container.addEventListener('keydown', (event) => {
      const index = indexOf(event);
      if (index !== null && view().press(event.key, index)) event.preventDefault();
    });
  }

  /** Handle a key on a token; return true if the key has an effect. */
  press(key, index) {
    if (key === 'Enter' || key === ' ') this.act('keep', index);
    else if (key === 'Escape') this.act('keep', null);
    else if (key === 'PageUp') this.act('layer', 1);
    else if (key === 'PageDown') this.act('layer', -1);
    else return this.go(key, index);
    return true;
  }

  /** Bring a token into view within the text, and the text into the window. */
  show(index) {
    const element = this.elements[index];
    if (!this.text.contains(element)) return;
    const [box, own] = [this.text.getBoundingClientRect(), element.getBoundingClientRect()];
    this.text.scrollTop += own.top + own.height / 2 - box.top - box.height / 2;
  }

  /** Color the tokens by `values`, and the bars below them by `bars`, or by none. */
  paint(values, largest, bars, current, kept) {
    const highest = bars ? largestOf(bars) : 0;
    this.elements.forEach((element, index) => {
      const tinted = this.placed.has(index) ? '' : tint(values[index], largest);
      const colors = [tinted, bars ? tint(bars[index], highest) : ''];
      const before = this.colors[index];
      if (before[0] !== colors[0]) element.style.backgroundColor = colors[0];
      if (before[1] !== colors[1]) element.style.borderBottomColor = colors[1];
      this.colors[index] = colors;
    });
    if (this.current !== undefined) this.elements[this.current].classList.remove('current');
    this.current = current === null ? undefined : current;
    if (current !== null) this.elements[current].classList.add('current');
    if (this.pressed !== undefined) this.elements[this.pressed].setAttribute('aria-pressed', 'false');
    this.pressed = kept === null ? undefined : kept;
    if (kept !== null) this.elements[kept].setAttribute('aria-pressed', 'true');
  }
}
