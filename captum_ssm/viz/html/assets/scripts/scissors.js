'use strict';

/* The prompt and its answer, with messages between tokens as arcs that a click cuts. */

/** A pair of scissors that open to the left, around the origin. */
const SCISSORS = 'M-5 4.2 4.2-4.6M-5-4.2 4.2 4.6M5.2 2.9a2 2 0 1 1 1.4 3.6 2 2 0 1 1-1.4-3.6M5.2-2.9a2 2 0 1 0 1.4-3.6 2 2 0 1 0-1.4 3.6';
/** Longer texts show only the ends of messages. */
const WHOLE = 32;
/** With letters smaller than this, in pixels, tokens are in a column. */
const SMALLEST = 14;
/** Pixels of arcs: the thinnest, the thickest for text in a line or a column, and the sum of all. */
const ARCS = { thinnest: 1.6, line: 15, column: 10, together: 60 };
/** Pixels from one bar to the next. */
const BAR = 31;

/** Put a separator between parts. */
const joinedBy = (parts, between) => parts.flatMap((part, index) => (index ? [between, ...part] : part));

/** Write a number without a plus sign. */
const plain = (value) => short(value).replace(/^\+/, '');

class Scissors {
  /** `remember` keeps the cuts in the address. */
  constructor(section, remember) {
    this.section = section;
    this.remember = remember;
    this.cuts = [];
    const find = (selector) => section.querySelector(selector);
    this.stage = find('.stage');
    [this.svg, this.prompt, this.tip, this.nudge] = ['.arcs', '.prompt', '.tip', '.nudge'].map(find);
    [this.say, this.why, this.healing, this.bars] = ['.say', '.why', '.heal', '.bars'].map(find);
    this.table = find('table');
    this.nudge.prepend(draw('svg', { viewBox: '-9 -9 18 18', width: 16 }, draw('path', { d: SCISSORS })));
    this.healing.addEventListener('click', () => this.heal());
    find('.copy').addEventListener('click', () => this.copy());
    this.listen();
    new ResizeObserver(() => this.layOut()).observe(this.stage);
  }

  /** Show an example, with nothing cut. */
  show(example) {
    const { tokens, cuts: { rows, states, labels, obstacle } } = example;
    Object.assign(this, { example, tokens, rows, states, labels, cuts: [], pointed: null, bar: new Map() });
    this.section.hidden = !rows.length && obstacle === null;
    const note = byId('cuts-obstacle');
    note.hidden = obstacle === null;
    note.textContent = `Messages cannot be cut: ${obstacle}`;
    for (const part of this.section.querySelectorAll('.card, details')) part.hidden = !rows.length;
    if (!rows.length) return;
    this.repeated = new Set(tokens.filter((token, index) => tokens.indexOf(token) !== index));
    this.answer = labels[0] ?? 'the output';
    const scores = Object.values(states).map(([score]) => score);
    this.ends = [Math.min(0, ...scores), Math.max(0, ...scores)];
    for (const name of this.section.querySelectorAll('.answered')) name.textContent = cutLabel(this.answer);
    const pictured = example.image === null;
    for (const name of ['.stage', '.key', '.copy']) this.section.querySelector(name).hidden = !pictured;
    const sends = rows.some(({ target }) => target === null);
    this.section.querySelector('.senders').hidden = !sends;
    this.section.querySelector('.card').classList.toggle('sends', sends);
    this.section.querySelector('details').open = !pictured;
    byId('cuts-rough').hidden = !rows.some((row) => row.first_order);
    this.bars.replaceChildren();
    this.write();
    this.list();
    this.arcs = rows.map((_, index) => this.arc(index));
    this.svg.replaceChildren(draw('g', { class: 'bands', 'aria-hidden': true }), ...this.arcs.map(({ all }) => all));
    this.reach(0);
    this.tell();
    this.width = null;
    this.layOut();
  }

  /** Name a row in an address, as `layer.source.target` or, for all messages from a token, `all.source`. */
  key(index) {
    const { layer, source, target } = this.rows[index];
    return (target === null ? ['all', source] : [layer, source, target]).join('.');
  }

  /** Cut what an address names, between commas. */
  read(named) {
    if (!this.rows.length) return;
    const keys = this.rows.map((_, index) => this.key(index));
    const found = named === null ? [] : named.split(',').map((key) => keys.indexOf(key));
    const known = this.state(found) !== undefined;
    this.cuts = known ? found : [];
    this.tell();
    if (!known) this.why.textContent = 'This file has no run for the cut in the address, so nothing is cut.';
  }

  /** Return the stored run without some messages, or undefined. */
  state(cuts) {
    return this.states[[...cuts].sort((a, b) => a - b).join('-')];
  }

  /** Return a cut's change of the score, after the present cuts if this was run. */
  change(index, cuts = this.cuts) {
    const found = cuts.includes(index) ? undefined : this.state([...cuts, index]);
    return found ? found[0] - this.state(cuts)[0] : this.states[index][0] - this.states[''][0];
  }

  /** Return the reason why a message cannot be cut now, or null. */
  obstacle(index) {
    if (this.cuts.includes(index) || this.state([...this.cuts, index])) return null;
    if (this.cuts.length > 1) return ['At most two cuts can be combined. Restore one first.'];
    return ['There is no run without both this and ', ...this.named(this.cuts[0]), '. Restore that one first.'];
  }

  /** Return nodes for a token, with its position if the text repeats it. */
  word(index) {
    const token = this.tokens[index];
    return [make('bdi', {}, token), ...(this.repeated.has(token) ? [make('sub', {}, index)] : [])];
  }

  /** Return nodes for a message. */
  named(index) {
    const { source, target } = this.rows[index];
    if (target === null) return [...this.word(source), ' → all others'];
    if (source === target) return [...this.word(source), ' to itself'];
    return [...this.word(source), ' → ', ...this.word(target)];
  }

  /** Describe a message. */
  said(index) {
    const { layer, source, target } = this.rows[index];
    if (target === null) return `all messages from “${this.tokens[source]}” (token ${source}) to other tokens`;
    const to = source === target ? 'itself' : `“${this.tokens[target]}” (token ${target})`;
    return `the message from “${this.tokens[source]}” (token ${source}) to ${to}, layer ${layer}`;
  }

  /** Cut a message, or restore it. */
  toggle(index) {
    const obstacle = this.obstacle(index);
    if (obstacle) {
      this.why.replaceChildren(...obstacle);
      return;
    }
    const cut = this.cuts.includes(index);
    this.set(cut ? this.cuts.filter((each) => each !== index) : [...this.cuts, index]);
  }

  set(cuts) {
    this.cuts = cuts;
    this.remember(cuts.map((index) => this.key(index)).join(','));
    this.tell();
    this.point(this.pointed);
  }

  heal() {
    if (!this.cuts.length) return;
    const [last] = this.cuts;
    this.set([]);
    const button = this.stage.hidden ? this.buttons[last] : this.arcs[last].all;
    button.focus({ preventScroll: true });
  }

  /** Write the tokens and the answer. */
  write() {
    const { tokens, example: { joined, marks, asking, direction } } = this;
    const joinedTo = new Set(joined);
    const last = this.labels.length ? asking ?? tokens.length - 1 : null;
    const kept = new Set([last, ...this.rows.flatMap(({ source, target }) => [source, target])]);
    const shown = (index) => tokens.length <= WHOLE || kept.has(index) || (kept.has(index - 1) && kept.has(index + 1));
    this.stage.dir = direction;
    this.prompt.replaceChildren();
    this.words = new Map();
    this.frame = make('b', { className: 'framed' });
    this.chance = make('span', { className: 'chance' });
    tokens.forEach((token, index) => {
      if (shown(index)) {
        const word = make('bdi', { className: 'word', title: `${token} (token ${index})` }, cutLabel(token));
        word.classList.toggle('joined', joinedTo.has(index) && shown(index - 1));
        word.classList.toggle('mark', marks.includes(index));
        this.words.set(index, word);
        if (index && !word.classList.contains('joined')) this.prompt.append(' ');
        this.prompt.append(word);
      } else if (shown(index - 1) || index === 0) {
        this.prompt.append(' ', make('span', { className: 'gap' }, '…'));
      }
      if (index === last) this.prompt.append(' ', make('span', { className: 'end' }, this.frame, this.chance));
    });
  }

  /** Make a message's arc, which is a button. */
  arc(index) {
    const part = (tag, name, ...children) => draw(tag, { class: name }, ...children);
    const badge = part('g', 'badge', draw('circle', { r: 12 }), draw('path', { d: SCISSORS }));
    const parts = { halo: part('path', 'halo'), ink: part('path', 'ink'), head: part('path', 'head'), badge };
    const all = draw('g', { class: 'arc', role: 'button', tabindex: -1 }, ...Object.values(parts));
    all.addEventListener('click', () => this.toggle(index)); // only assistive technology sends this click
    all.addEventListener('focus', () => {
      if (all.matches(':focus-visible')) this.point(index);
    });
    all.addEventListener('blur', () => this.point(null));
    return { all, ...parts };
  }

  /** Let Tab come to this arc. */
  reach(index) {
    this.arcs.forEach(({ all }, place) => all.setAttribute('tabindex', place === index ? 0 : -1));
    this.reached = index;
  }

  listen() {
    const { stage } = this;
    const inWords = (event) => event.target.closest('.word, .end');
    const at = (event) => (inWords(event) ? null : this.nearest(event));
    stage.addEventListener('pointermove', (event) => {
      const index = at(event);
      if (index !== this.pointed && event.pointerType !== 'touch') this.point(index);
      stage.style.cursor = index === null ? '' : this.obstacle(index) ? 'not-allowed' : 'pointer';
    });
    stage.addEventListener('pointerleave', () => this.point(null));
    stage.addEventListener('click', (event) => {
      if (event.target.closest('.arc') || !getSelection().isCollapsed) return;
      const index = at(event);
      if (index === null) return;
      this.reach(index);
      this.arcs[index].all.focus({ preventScroll: true });
      this.point(index);
      this.toggle(index);
    });
    this.svg.addEventListener('keydown', (event) => {
      const last = this.rows.length - 1;
      const places = {
        ArrowRight: this.reached + 1, ArrowDown: this.reached + 1, Home: 0, End: last,
        ArrowLeft: this.reached - 1, ArrowUp: this.reached - 1,
      };
      if (event.key === 'Enter' || event.key === ' ') this.toggle(this.reached);
      else if (Object.hasOwn(places, event.key)) {
        this.reach(Math.max(0, Math.min(last, places[event.key])));
        this.arcs[this.reached].all.focus();
      } else return;
      event.preventDefault();
    });
    this.section.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') this.heal();
    });
  }

  /** Return the arc nearest to the pointer; arcs that share a word overlap there. */
  nearest(event) {
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let [best, least] = [null, event.pointerType === 'touch' ? 18 : 10];
    this.arcs.forEach(({ points, width }, index) => {
      const distance = Math.min(...points.map((point) => Math.hypot(point.x - x, point.y - y))) - width / 2;
      if (distance < least) [best, least] = [index, distance];
    });
    return best;
  }

  /** Place words and arcs again if the width changes. */
  layOut() {
    const { stage, prompt, rows } = this;
    if (!rows?.length || stage.hidden || stage.clientWidth === this.width) return;
    const card = stage.parentElement;
    const sent = (row) => row.target === null; // a dot, and no arc
    const layers = [...new Set(rows.filter((row) => !sent(row)).map((row) => row.layer))].sort((a, b) => a - b);
    card.classList.remove('tall');
    prompt.style.fontSize = prompt.style.marginInlineStart = '';
    stage.style.setProperty('--sky', `${Math.min(440, Math.max(230, 40 * layers.length))}px`);
    let column = innerWidth <= 760;
    if (!column && prompt.scrollWidth > stage.clientWidth - 70) {
      const size = (parseFloat(getComputedStyle(prompt).fontSize) * (stage.clientWidth - 70)) / prompt.scrollWidth;
      column = size < SMALLEST;
      if (!column) prompt.style.fontSize = `${size}px`;
    }
    // centered by a margin, so that words do not move if the answer changes
    if (!column) prompt.style.marginInlineStart = `${Math.max(0, (stage.clientWidth - prompt.offsetWidth) / 2)}px`;
    card.classList.toggle('tall', column);
    this.column = column;
    const sizes = rows.map((_, index) => Math.abs(this.change(index, [])));
    const sum = sumOf(sizes.filter((_, index) => !sent(rows[index])));
    this.largest = Math.max(...sizes);
    this.thickest = Math.min(column ? ARCS.column : ARCS.line, Math.max(4, (ARCS.together * this.largest) / sum));
    const thick = (index) => Math.max(ARCS.thinnest, (this.thickest * sizes[index]) / this.largest);
    const least = this.words.size > 20 ? 22 : 25;
    const heights = new Map();
    for (const [token, word] of this.words) {
      const need = rows.map(({ source, target }, index) => (target === null ? 0 : 1) * ((source === token) + (target === token)) * (Math.max(5, thick(index)) + 2));
      heights.set(token, Math.max(least, Math.min(78, need.reduce((sum, x) => sum + x, 0))));
      word.style.lineHeight = column ? `${heights.get(token)}px` : '';
    }
    this.width = stage.clientWidth;
    const box = stage.getBoundingClientRect();
    const places = new Map([...this.words].map(([token, word]) => [token, word.getBoundingClientRect()]));
    const boxes = [...places.values()];
    // `u` is the position along the words, `h` the distance from them
    const edge = column ? Math.max(...boxes.map((each) => each.right)) - box.left + 6 : boxes[0].top - box.top - 2;
    const room = column ? Math.min(box.width - edge - 16, 420) : edge - 16;
    const middle = (token) => {
      const { left, right, top, bottom } = places.get(token);
      return column ? (top + bottom) / 2 - box.top : (left + right) / 2 - box.left;
    };
    const at = (u, h) => (column ? `${(edge + h).toFixed(1)} ${u.toFixed(1)}` : `${u.toFixed(1)} ${(edge - h).toFixed(1)}`);
    // a layer with many arcs gets more room
    const crowds = layers.map((layer) => Math.sqrt(rows.filter((row) => row.layer === layer).length));
    const crowd = crowds.reduce((one, other) => one + other);
    let begin = 0;
    const bands = crowds.map((each) => {
      const size = (room * each) / crowd;
      begin += size;
      return { low: begin - size, size };
    });
    const length = ({ source, target }) => Math.abs(middle(target) - middle(source));
    rows.forEach((row, index) => {
      const arc = this.arcs[index];
      arc.width = thick(index);
      if (sent(row)) return;
      const { low, size } = bands[layers.indexOf(row.layer)];
      const far = Math.max(...rows.filter(({ layer }) => layer === row.layer).map(length));
      const free = Math.min(low ? 18 : 26, size / 2);
      arc.height = low + free + Math.max(0, size - free - arc.width / 2 - 6) * Math.sqrt(length(row) / Math.max(1, far));
      if (row.source === row.target) arc.height = 17;
    });
    // ends of arcs are side by side, so that nested arcs do not cross
    for (const [token] of this.words) {
      const ends = [];
      rows.forEach(({ source, target }, index) => {
        if (target === null) return;
        const { height } = this.arcs[index];
        const later = middle(target) >= middle(source) ? 1 : -1;
        if (source === target) {
          if (source === token) ends.push([index, 'from', 0], [index, 'to', 0.1]);
        } else if (target === token) ends.push([index, 'to', later * (height - 1e4)]);
        else if (source === token) ends.push([index, 'from', later * (1e4 - height)]);
      });
      ends.sort((a, b) => a[2] - b[2]);
      const wide = ends.map(([index, end]) => Math.max(this.arcs[index].width, end === 'to' ? 7 : 2) + (rows[index].source === rows[index].target ? 5 : 2));
      const all = wide.reduce((sum, x) => sum + x, 0);
      const span = column ? heights.get(token) - 12 : places.get(token).width + 8;
      const fit = Math.min(1, (span + 10) / all);
      let u = middle(token) - (all * fit) / 2;
      ends.forEach(([index, end], place) => {
        this.arcs[index][end] = u + (wide[place] * fit) / 2;
        u += wide[place] * fit;
      });
    }
    this.arcs.forEach((arc, index) => {
      const { from, to, height, ink, halo, badge, width } = arc;
      if (sent(rows[index])) {
        this.placeDot(arc, places.get(rows[index].source), box);
        return;
      }
      const self = rows[index].source === rows[index].target;
      const [top, aside] = self ? [height * 1.5, 7] : [(height * 4) / 3, 0];
      const path = `M${at(from, 1)}C${at(from - aside, top)} ${at(to + aside, top)} ${at(to, arrowOf(width) * 1.5)}`;
      for (const each of [halo, ink]) each.setAttribute('d', path);
      arc.tip = (half) => `M${at(to - half, half * 1.5)}L${at(to + half, half * 1.5)}L${at(to, 0)}Z`;
      const long = ink.getTotalLength();
      const many = Math.ceil(long / 5);
      arc.points = Array.from({ length: many + 1 }, (_, place) => ink.getPointAtLength((long * place) / many));
      const middle = (from + to) / 2;
      arc.peak = self ? arc.points[many >> 1] : { x: column ? edge + height : middle, y: column ? middle : edge - height };
      badge.setAttribute('transform', `translate(${arc.peak.x} ${arc.peak.y})`);
    });
    this.paintBands(layers, bands, edge, box.width, Math.max(...boxes.map((each) => each.bottom)) - box.top);
    const { x, y } = this.arcs[0].peak;
    this.nudge.style.left = `${Math.max(66, Math.min(box.width - 66, x))}px`;
    this.nudge.style.top = `${y}px`;
    this.weigh();
  }

  /** Place the dot of all messages from a token: below the word, or before it in a column. */
  placeDot(arc, word, box) {
    const [x, y] = this.column ? [11, (word.top + word.bottom) / 2 - box.top] : [(word.left + word.right) / 2 - box.left, word.bottom - box.top + 17];
    const edge = this.column ? `M${word.left - box.left - 3} ${y}H${x}` : `M${x} ${word.bottom - box.top + 1}V${y}`;
    for (const each of [arc.halo, arc.ink]) each.setAttribute('d', edge);
    arc.tip = (half) => `M${x - half} ${y}a${half} ${half} 0 1 0 ${2 * half} 0a${half} ${half} 0 1 0 ${-2 * half} 0Z`;
    arc.peak = { x, y };
    arc.points = [arc.peak];
    arc.dot = true;
    arc.badge.setAttribute('transform', `translate(${x} ${y})`);
  }

  /** Paint lines between layers, and layer numbers if there is room. */
  paintBands(layers, bands, edge, width, bottom) {
    let named = -Infinity;
    const lines = layers.flatMap((layer, index) => {
      const { low, size } = bands[index];
      const middle = low + size / 2;
      const place = this.column ? { x: edge + middle, y: 4, class: 'middle' } : { x: 0, y: edge - middle + 4 };
      const fits = middle - named >= (this.column ? 56 : 16);
      if (fits) named = middle;
      const line = this.column ? `M${edge + low} 12V${bottom}` : `M0 ${edge - low}H${width}`;
      return [...(fits ? [draw('text', place, `layer ${layer}`)] : []), ...(index ? [draw('path', { d: line })] : [])];
    });
    this.svg.firstChild.replaceChildren(...lines);
  }

  /** Set widths and colors by the change that one more cut would make. */
  weigh() {
    const { largest, thickest } = this;
    this.arcs.forEach((arc, index) => {
      const change = this.change(index);
      const open = this.cuts.includes(index) || !this.obstacle(index);
      arc.all.classList.toggle('against', change > 0);
      if (arc.width === undefined) return;
      arc.width = open ? Math.max(ARCS.thinnest, thickest * Math.min(1, Math.abs(change) / largest)) : ARCS.thinnest;
      arc.ink.style.strokeWidth = `${arc.dot ? ARCS.thinnest : arc.width}px`;
      arc.halo.style.strokeWidth = `${arc.width + 10}px`;
      arc.head.setAttribute('d', arc.tip(arrowOf(arc.width)));
    });
  }

  /** Show a message's words, and the effect of its cut, in one line. */
  point(index) {
    this.pointed = index;
    const { source, target, layer, effect, first_order: rough } = this.rows[index] ?? {};
    for (const [token, word] of this.words) word.classList.toggle('on', token === source || token === target);
    this.arcs.forEach(({ all }, place) => all.classList.toggle('near', place === index));
    this.tip.classList.toggle('shown', index !== null);
    this.nudge.hidden ||= index !== null;
    if (index === null) return;
    const obstacle = this.obstacle(index);
    const further = this.cuts.length && !obstacle && !this.cuts.includes(index);
    const alone = short(this.change(index, []));
    const estimated = `${rough ? '≈ ' : ''}${short(-effect)}`;
    const parts = [
      [make('b', {}, ...this.named(index)), layer === null ? ', all layers' : `, layer ${layer}`],
      further ? ['cutting it too changes the score of ', make('bdi', {}, this.answer), ' by ', make('b', {}, short(this.change(index)))]
        : ['cutting it changes the score of ', make('bdi', {}, this.answer), ' by ', make('b', {}, alone)],
      [`${further ? `cut alone ${alone}, ` : ''}estimate ${estimated}`],
      obstacle ?? [this.cuts.includes(index) ? 'Click to restore' : 'Click to cut'],
    ];
    this.tip.replaceChildren(...joinedBy(parts, make('i', {}, '·')).map((node) => node.cloneNode?.(true) ?? node));
    const { x, y } = this.arcs[index].peak;
    const wide = this.stage.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(wide, x - this.tip.offsetWidth / 2))}px`;
    this.tip.style.top = `${this.column ? y + 20 : this.stage.clientHeight + 8}px`;
  }

  /** Show the cuts and the model's output: frame, sentence, bars, arcs and table. */
  tell() {
    const { cuts, rows } = this;
    const state = this.state(cuts);
    this.healing.hidden = !cuts.length;
    this.healing.textContent = cuts.length > 1 ? 'Restore both' : 'Restore it';
    if (cuts.length) this.nudge.hidden = true;
    this.say.replaceChildren(...this.sentence());
    const call = make('code', {}, `knock_out(model, ${cuts.map((index) => rows[index].call).join(', ')})`);
    this.why.replaceChildren(...(cuts.length ? [...this.next(), 'In Python: ', call] : []));
    if (this.labels.length) {
      const [, , first, chance] = state;
      const label = cutLabel(this.labels[first]);
      if (this.frame.textContent !== label) {
        this.frame.textContent = label;
        this.frame.classList.toggle('popped');
        this.frame.classList.toggle('popped-again', !this.frame.classList.contains('popped'));
      }
      this.frame.classList.toggle('wanted', first === 0);
      this.chance.textContent = percent(chance);
    }
    this.showBars(state);
    this.weigh();
    rows.forEach((_, index) => {
      const { all } = this.arcs[index];
      const cut = cuts.includes(index);
      const obstacle = (this.obstacle(index) ?? []).map((part) => part.textContent ?? part).join('');
      const button = this.buttons[index];
      for (const each of [all, button]) {
        each.setAttribute('aria-pressed', cut);
        each.setAttribute('aria-disabled', obstacle !== '');
      }
      all.classList.toggle('cut', cut);
      all.setAttribute('aria-label', `Cut ${this.said(index)}. Without it the score of ${this.answer} changes by ${short(this.change(index, []))}. ${obstacle}`);
      button.title = obstacle;
    });
  }

  /** Return nodes that describe the model's output. */
  sentence() {
    const [score, asked, first, chance] = this.state(this.cuts);
    const [whole, before, likeliest, surest] = this.states[''];
    const own = () => make('b', { className: 'own' }, make('bdi', {}, this.answer));
    const without = ['Without ', ...joinedBy(this.cuts.map((index) => [make('b', {}, ...this.named(index))]), ' and ')];
    const says = (label) => (label ? make('b', {}, make('bdi', {}, this.labels[label])) : own());
    if (!this.labels.length) {
      return this.cuts.length ? [...without, ` the output is ${plain(score)} instead of ${plain(whole)}.`] : [`The output is ${plain(whole)}.`];
    }
    if (!this.cuts.length) {
      const other = likeliest ? ['The explained prediction is ', own(), `, at ${percent(before)}. `] : [];
      return ['The model predicts ', says(likeliest), ` at ${percent(surest)}. `, ...other, 'The strongest message is ', make('b', {}, ...this.named(0)), '. Cutting it changes the score of ', own(), ` by ${short(this.change(0))}.`];
    }
    const moved = [own(), ` goes from ${percent(before)} to ${percent(asked)}.`];
    if (likeliest || first) return [...without, ' the model predicts ', says(first), ` at ${percent(chance)}. `, ...moved];
    if (percent(asked) !== percent(before)) return [...without, ' the answer is still ', own(), `, at ${percent(asked)} instead of ${percent(before)}.`];
    return [...without, ' the answer is still ', own(), `, at ${percent(asked)}. Its score goes from ${plain(whole)} to ${plain(score)}.`];
  }

  /** Name the strongest remaining message, if all pairs with the cut one were run. */
  next() {
    const others = [...this.rows.keys()].filter((index) => index !== this.cuts[0] && this.rows[index].target !== null);
    if (this.cuts.length > 1 || !others.length || others.some((index) => this.obstacle(index))) return [];
    const size = (index) => Math.abs(this.change(index));
    const best = others.reduce((one, other) => (size(other) > size(one) ? other : one));
    return ['The strongest message left is ', make('b', {}, ...this.named(best)), '. Cutting it too changes the score by ', short(this.change(best)), '.', make('br')];
  }

  /** Show bars for the likeliest answers, the others and the score; pale bars are before the cut. */
  showBars([score, asked, ...best]) {
    const [low, high] = this.ends;
    const [whole, before] = this.states[''];
    const share = (value) => (high > low ? (value - low) / (high - low) : 0);
    const list = [];
    for (let place = 0; place < best.length; place += 2) list.push([best[place], best[place + 1]]);
    if (list.length && !list.some(([label]) => label === 0)) list[list.length - 1] = [0, asked];
    const lines = list.map(([label, chance]) => [label, this.labels[label], chance, percent(chance), label === 0 ? before : null]);
    const rest = this.example.cuts.classes - list.length;
    const left = Math.max(0, 1 - list.reduce((sum, [, chance]) => sum + chance, 0));
    if (list.length && rest) lines.push(['rest', `${rest} others`, left, percent(left), null]);
    lines.push(['score', this.labels.length ? `score of ${this.answer}` : this.answer, share(score), plain(score), share(whole)]);
    const gone = new Set(this.bar.keys());
    lines.forEach(([key, label, filled, told, was], place) => {
      gone.delete(key);
      if (!this.bar.has(key)) this.bar.set(key, this.makeBar(label));
      const line = this.bar.get(key);
      line.hidden = false;
      line.className = typeof key === 'string' ? key : key === 0 ? 'own' : '';
      line.style.transform = `translateY(${place * BAR + (key === 'score') * 10}px)`;
      const [now, then] = line.querySelectorAll('i');
      now.style.transform = `scaleX(${filled})`;
      then.style.transform = `scaleX(${this.cuts.length && was !== null ? was : 0})`;
      line.lastChild.textContent = told;
    });
    for (const key of gone) this.bar.get(key).hidden = true;
    this.bars.style.height = `${lines.length * BAR + 14}px`;
  }

  makeBar(label) {
    const track = make('span', { className: 'track' }, make('i', { className: 'now' }), make('i', { className: 'then' }));
    const line = make('li', {}, make('bdi', { title: label }, label), track, make('span'));
    this.bars.append(line);
    return line;
  }

  /** Copy words, arcs and sentence as one picture; save a file if copying is not allowed. */
  async copy() {
    const { stage, svg, say } = this;
    const page = getComputedStyle(document.body);
    const { left, top, width, height } = stage.getBoundingClientRect();
    const made = svg.cloneNode(true);
    const all = [...made.querySelectorAll('*')];
    const wear = (element, seen) => {
      const looks = getComputedStyle(seen);
      for (const name of LOOKS) element.style.setProperty(name, looks.getPropertyValue(name));
      return looks;
    };
    [...svg.querySelectorAll('*')].forEach((seen, index) => wear(all[index], seen));
    for (const seen of [...this.words.values(), this.frame, this.chance, ...stage.querySelectorAll('.gap')]) {
      const box = seen.getBoundingClientRect();
      const text = draw('text', { x: box.left - left, y: (box.top + box.bottom) / 2 - top, dy: '0.35em' }, seen.textContent);
      text.style.fill = wear(text, seen).color;
      made.append(text);
    }
    const told = draw('text', { x: 0, y: height + 24 }, say.textContent);
    told.style.cssText = `font: 15px ${page.fontFamily}; fill: ${page.color}`;
    made.append(told);
    const size = { width: Math.max(width, ruler(say)(say.textContent) * 1.3) + 32, height: height + 64 };
    const looks = { ...size, viewBox: `-16 -16 ${size.width} ${size.height}` };
    for (const [name, value] of Object.entries(looks)) made.setAttribute(name, value);
    const image = new Image();
    image.src = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(made))}`;
    await image.decode();
    const canvas = make('canvas', { width: 2 * size.width, height: 2 * size.height });
    const context = canvas.getContext('2d');
    context.fillStyle = page.backgroundColor;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    const blob = await new Promise((done) => canvas.toBlob(done));
    try {
      await navigator.clipboard.write([new ClipboardItem({ [blob.type]: blob })]);
      this.why.textContent = 'The picture is copied.';
    } catch {
      make('a', { href: URL.createObjectURL(blob), download: 'scissors.png' }).click();
      this.why.textContent = 'The picture is saved as scissors.png.';
    }
  }

  /** Fill the table of messages, each with a button. */
  list() {
    const cell = (...content) => make('td', {}, ...content);
    const number = (text) => make('td', { className: 'number' }, text);
    const body = this.rows.map(({ layer, effect, first_order: rough }, index) => {
      const button = make('button', { type: 'button' }, 'Cut');
      button.setAttribute('aria-label', `Cut ${this.said(index)}`);
      button.addEventListener('click', () => this.toggle(index));
      const [, asked, first] = this.states[index];
      const then = this.labels.length ? [number(percent(asked)), cell(make('bdi', {}, this.labels[first]))] : [];
      return make('tr', {}, cell(button), cell(...this.named(index)), number(layer ?? 'all'), number(short(this.change(index, []))), number(`${rough ? '≈ ' : ''}${short(-effect)}`), ...then);
    });
    const heads = ['', 'Message', 'Layer', 'Score change', 'Estimate', ...(this.labels.length ? [`${this.answer} after cut`, 'Answer after cut'] : [])];
    const head = heads.map((text, index) => make(text ? 'th' : 'td', { className: [2, 3, 4, 5].includes(index) ? 'number' : '' }, text));
    this.table.tHead.replaceChildren(make('tr', {}, ...head));
    this.table.tBodies[0].replaceChildren(...body);
    this.buttons = [...this.table.querySelectorAll('button')];
  }
}

/** Style properties that a copied picture keeps. */
const LOOKS = ['fill', 'stroke', 'stroke-width', 'stroke-dasharray', 'stroke-linecap', 'opacity', 'font', 'text-anchor'];

/** Return half the width of an arc's head. */
const arrowOf = (width) => Math.max(3.4, width / 2 + 3);
