'use strict';

/* Choices of methods, their arguments, and the filter. */

/** The most suggested classes at a time; a vocabulary may have many. */
const SUGGESTED = 100;

/** Suggest the texts that contain the typed letters. */
function suggest(list, texts, typed) {
  const fitting = texts.filter((text) => text.toLowerCase().includes(typed.toLowerCase()));
  list.replaceChildren(...fitting.slice(0, SUGGESTED).map((value) => make('option', { value })));
}

/** The most methods side by side. */
const MOST_METHODS = 4;

/** One of the methods that are shown, with its arguments. */
class MethodChoice {
  /** `number` counts from 0; `remove` removes the method, and is null for the first. */
  constructor(config, number, [name, values], remove) {
    this.config = config;
    this.values = { [name]: { ...values } }; // by method, what its arguments were set to
    this.fields = {}; // by argument of the method shown, a function that reads it
    this.ending = number ? `-${number + 1}` : '';
    this.list = make('select', { id: `method${this.ending}` }, ...config.methods.map((each) => {
      const fits = config.obstacles[each].some((reason) => reason === null);
      return make('option', { value: each, disabled: !fits }, each);
    }));
    this.list.value = name;
    this.list.addEventListener('change', () => this.#showArguments());
    this.arguments = make('div', { className: 'arguments' });
    this.help = make('p', { className: 'note' });
    const caption = number ? 'Compare with' : 'Attribution method';
    this.element = make('div', { className: 'choice' }, make('label', {}, `${caption} `, this.list), this.arguments);
    if (remove) {
      const button = make('button', { type: 'button', className: 'remove' }, 'Remove');
      button.setAttribute('aria-label', `Remove method ${number + 1}`);
      button.addEventListener('click', remove);
      this.element.append(button);
    }
    this.element.append(this.help);
    this.#showArguments();
  }

  /** The method and its arguments. */
  read() {
    this.#keep();
    return [this.shown, this.values[this.shown]];
  }

  #showArguments() {
    this.#keep();
    this.shown = this.list.value;
    this.fields = {};
    const known = this.config.method_arguments[this.shown] ?? {};
    const values = this.values[this.shown] ?? {};
    const labels = Object.entries(known).map(([name, kind]) => {
      const [field, read] = KINDS[kind.type](kind, name in values ? values[name] : kind.value, this.config);
      field.id = `argument-${name}${this.ending}`;
      this.fields[name] = read;
      const inline = kind.type === 'boolean';
      return make('label', { className: inline ? 'inline' : '' }, `${name} `, field);
    });
    this.arguments.replaceChildren(...labels);
    this.help.textContent = this.config.method_help[this.shown] ?? '';
  }

  #keep() {
    if (this.shown === undefined) return;
    const values = { ...this.values[this.shown] };
    for (const [name, read] of Object.entries(this.fields)) {
      values[name] = read();
      if (values[name] === undefined) delete values[name]; // use the default
    }
    this.values[this.shown] = values;
  }
}

class Controls {
  constructor(config) {
    this.config = config;
    this.classes = [...config.filter.classes];
    const { attribution_method: first, attribution_arguments: values, beside } = config.filter;
    this.methods = [];
    for (const one of [[first, values], ...beside]) this.#addMethod(one);
    byId('add-method').addEventListener('click', () => {
      this.#addMethod(this.methods.at(-1).read());
      this.methods.at(-1).list.focus();
    });

    this.#tellObstacles();
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
  }

  /** Return the filter in the server's form. */
  read() {
    this.#addClass();
    const [[name, values], ...beside] = this.methods.map((method) => method.read());
    return {
      attribution_method: name,
      attribution_arguments: values,
      prediction: byId('prediction').value,
      classes: this.classes,
      num_examples: byId('count').valueAsNumber,
      beside,
    };
  }

  /** Add a method; the numbers change when a method is removed. */
  #addMethod(chosen) {
    const number = this.methods.length;
    const remove = () => {
      const left = this.methods.filter((_, index) => index !== number).map((method) => method.read());
      this.methods = [];
      for (const one of left) this.#addMethod(one);
      byId('add-method').focus();
    };
    this.methods.push(new MethodChoice(this.config, number, chosen, number ? remove : null));
    byId('methods').replaceChildren(...this.methods.map(({ element }) => element));
    byId('add-method').disabled = this.methods.length === MOST_METHODS;
  }

  #tellObstacles() {
    const reasons = byId('unfit').querySelector('dl');
    for (const name of this.config.methods) {
      const obstacles = this.config.obstacles[name];
      const common = new Set(obstacles).size === 1; // the same for all models
      obstacles.slice(0, common ? 1 : undefined).forEach((reason, model) => {
        if (reason === null) return;
        const which = common ? name : `${name}, model ${model + 1}`;
        reasons.append(make('dt', {}, which), make('dd', {}, readable(reason)));
      });
    }
    byId('unfit').hidden = reasons.children.length === 0;
    byId('unfit').querySelector('summary').textContent = 'Unavailable methods, with reasons';
  }

  #addClass() {
    const name = byId('class').value;
    if (name === '') return;
    if (!this.config.classes.includes(name)) {
      byId('class').setCustomValidity('No class has this name.');
      return;
    }
    if (!this.classes.includes(name)) this.classes.push(name);
    byId('class').value = '';
    this.#suggest();
    this.#showClasses();
  }

  #suggest() {
    byId('class').setCustomValidity('');
    suggest(byId('known-classes'), this.config.classes, byId('class').value);
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

/** Make the field of an argument, and a function that reads it, by kind. */
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
  contrast(kind, value, { classes }) {
    const field = make('input', { type: 'text', value: value ?? '', placeholder: 'none', autocomplete: 'off' });
    field.setAttribute('list', 'known-contrasts');
    const words = kind.limit.filter((word) => word !== null);
    const offer = () => {
      suggest(byId('known-contrasts'), [...words, ...classes], field.value);
      const known = field.value === '' || words.includes(field.value) || classes.includes(field.value);
      field.setCustomValidity(known ? '' : `Use one of ${words.join(', ')}, or the name of a class.`);
    };
    field.addEventListener('input', offer);
    field.addEventListener('focus', offer);
    return [field, () => field.value || null];
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
