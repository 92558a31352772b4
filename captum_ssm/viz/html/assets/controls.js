'use strict';

/* The choices: method, arguments, filter. */

/** More classes than this are not suggested at a time: a vocabulary is one, too. */
const SUGGESTED = 100;

class Controls {
  constructor(config) {
    this.config = config;
    this.classes = [...config.filter.classes];
    this.values = {}; // by method, what its arguments were set to
    this.values[config.filter.attribution_method] = { ...config.filter.attribution_arguments };
    this.fields = {}; // by argument of the method shown, a function that reads it

    this.#listMethods();
    byId('method').value = config.filter.attribution_method;
    byId('method').addEventListener('change', () => this.#showArguments());
    byId('prediction').value = config.filter.prediction;
    byId('count').value = config.filter.num_examples;
    byId('class').addEventListener('input', () => this.#suggest());
    byId('class').addEventListener('keydown', (event) => {
      if (event.key === 'Enter') {
        event.preventDefault();
        this.#addClass();
      }
    });
    byId('add-class').addEventListener('click', () => this.#addClass());
    this.#suggest();
    this.#showClasses();
    this.#showArguments();
  }

  /** The filter, as the server wants it. */
  read() {
    this.#addClass();
    this.#keep();
    return {
      attribution_method: this.shown,
      attribution_arguments: this.values[this.shown],
      prediction: byId('prediction').value,
      classes: this.classes,
      num_examples: byId('count').valueAsNumber,
    };
  }

  #listMethods() {
    const reasons = byId('unfit').querySelector('dl');
    for (const name of this.config.methods) {
      const obstacles = this.config.obstacles[name];
      const fits = obstacles.some((reason) => reason === null);
      byId('method').append(make('option', { value: name, disabled: !fits }, name));
      const common = new Set(obstacles).size === 1; // the same for all models
      obstacles.slice(0, common ? 1 : undefined).forEach((reason, model) => {
        if (reason === null) return;
        const which = common ? name : `${name}, model ${model + 1}`;
        reasons.append(make('dt', {}, which), make('dd', {}, readable(reason)));
      });
    }
    byId('unfit').hidden = reasons.children.length === 0;
    byId('unfit').querySelector('summary').textContent = 'Methods that do not fit, and why';
  }

  #showArguments() {
    this.#keep();
    this.shown = byId('method').value;
    this.fields = {};
    const known = this.config.method_arguments[this.shown] ?? {};
    const values = this.values[this.shown] ?? {};
    const labels = Object.entries(known).map(([name, kind]) => {
      const [field, read] = KINDS[kind.type](kind, name in values ? values[name] : kind.value);
      field.id = `argument-${name}`;
      this.fields[name] = read;
      const inline = kind.type === 'boolean';
      return make('label', { className: inline ? 'inline' : '' }, `${name} `, field);
    });
    byId('arguments').replaceChildren(...labels);
  }

  #keep() {
    if (this.shown !== undefined) {
      const values = { ...this.values[this.shown] };
      for (const [name, read] of Object.entries(this.fields)) {
        values[name] = read();
        if (values[name] === undefined) delete values[name]; // its default holds
      }
      this.values[this.shown] = values;
    }
  }

  #addClass() {
    const name = byId('class').value;
    if (name === '') return;
    if (!this.config.classes.includes(name)) {
      byId('class').setCustomValidity('There is no such class.');
      return;
    }
    if (!this.classes.includes(name)) this.classes.push(name);
    byId('class').value = '';
    this.#suggest();
    this.#showClasses();
  }

  #suggest() {
    const typed = byId('class').value.toLowerCase();
    byId('class').setCustomValidity('');
    const fitting = this.config.classes.filter((name) => name.toLowerCase().includes(typed));
    const options = fitting.slice(0, SUGGESTED).map((name) => make('option', { value: name }));
    byId('known-classes').replaceChildren(...options);
  }

  #showClasses() {
    const items = this.classes.map((name) => {
      const button = make('button', { type: 'button' }, `${readable(name)} ×`);
      button.setAttribute('aria-label', `Remove the class ${name}`);
      button.addEventListener('click', () => {
        this.classes = this.classes.filter((other) => other !== name);
        this.#showClasses();
        byId('class').focus();
      });
      return make('li', {}, button);
    });
    byId('classes').replaceChildren(...items);
  }
}

/** By kind of argument: its field, and a function that reads it. */
const KINDS = {
  number(kind, value) {
    const [min, max] = kind.limit;
    const field = make('input', { type: 'number', step: kind.whole ? '1' : 'any' });
    if (min !== null) field.min = min;
    if (max !== null) field.max = max;
    field.value = value;
    return [field, () => (Number.isNaN(field.valueAsNumber) ? undefined : field.valueAsNumber)];
  },
  enum(kind, value) {
    const field = make('select', {});
    kind.limit.forEach((word) => field.append(make('option', {}, word ?? 'default')));
    field.selectedIndex = Math.max(0, kind.limit.indexOf(value));
    return [field, () => kind.limit[field.selectedIndex]];
  },
  boolean(kind, value) {
    const field = make('input', { type: 'checkbox', checked: value });
    return [field, () => field.checked];
  },
  tuple(kind, value) {
    const text = Array.isArray(value) ? value.join(', ') : (value ?? '');
    const field = make('input', { type: 'text', value: text, placeholder: 'such as 3, 5, 5' });
    return [field, () => field.value];
  },
  string(kind, value) {
    const field = make('input', { type: 'text', value });
    return [field, () => field.value];
  },
};
