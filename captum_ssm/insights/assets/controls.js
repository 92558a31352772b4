// The choices: method, arguments, filter.

import { element, readable } from "./drawing.js";

const find = (id) => document.getElementById(id);

// More classes than this are not suggested at a time: a vocabulary is one, too.
const SUGGESTED = 100;

export class Controls {
  constructor(config) {
    this.config = config;
    this.classes = [...config.filter.classes];
    this.values = {}; // by method, what its arguments were set to
    this.values[config.filter.attribution_method] = { ...config.filter.attribution_arguments };
    this.fields = {}; // by argument of the method shown, a function that reads it

    this.#listMethods();
    find("method").value = config.filter.attribution_method;
    find("method").addEventListener("change", () => this.#showArguments());
    find("prediction").value = config.filter.prediction;
    find("count").value = config.filter.num_examples;
    find("class").addEventListener("input", () => this.#suggest());
    find("class").addEventListener("keydown", (event) => {
      if (event.key === "Enter") {
        event.preventDefault();
        this.#addClass();
      }
    });
    find("add-class").addEventListener("click", () => this.#addClass());
    this.#suggest();
    this.#showClasses();
    this.#showArguments();
  }

  // The filter, as the server wants it.
  read() {
    this.#addClass();
    this.#keep();
    return {
      attribution_method: this.shown,
      attribution_arguments: this.values[this.shown],
      prediction: find("prediction").value,
      classes: this.classes,
      num_examples: find("count").valueAsNumber,
    };
  }

  #listMethods() {
    const reasons = find("unfit").querySelector("dl");
    for (const name of this.config.methods) {
      const obstacles = this.config.obstacles[name];
      const fits = obstacles.some((reason) => reason === null);
      find("method").append(element("option", { value: name, disabled: !fits }, name));
      const common = new Set(obstacles).size === 1; // the same for all models
      obstacles.slice(0, common ? 1 : undefined).forEach((reason, model) => {
        if (reason === null) return;
        const which = common ? name : `${name}, model ${model + 1}`;
        reasons.append(element("dt", {}, which), element("dd", {}, readable(reason)));
      });
    }
    find("unfit").hidden = reasons.children.length === 0;
    find("unfit").querySelector("summary").textContent = "Methods that do not fit, and why";
  }

  #showArguments() {
    this.#keep();
    this.shown = find("method").value;
    this.fields = {};
    const known = this.config.method_arguments[this.shown] ?? {};
    const values = this.values[this.shown] ?? {};
    const labels = Object.entries(known).map(([name, kind]) => {
      const [field, read] = KINDS[kind.type](kind, name in values ? values[name] : kind.value);
      field.id = `argument-${name}`;
      this.fields[name] = read;
      const inline = kind.type === "boolean";
      return element("label", { className: inline ? "inline" : "" }, `${name} `, field);
    });
    find("arguments").replaceChildren(...labels);
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
    const name = find("class").value;
    if (name === "") return;
    if (!this.config.classes.includes(name)) {
      find("class").setCustomValidity("There is no such class.");
      return;
    }
    if (!this.classes.includes(name)) this.classes.push(name);
    find("class").value = "";
    this.#suggest();
    this.#showClasses();
  }

  #suggest() {
    const typed = find("class").value.toLowerCase();
    find("class").setCustomValidity("");
    const fitting = this.config.classes.filter((name) => name.toLowerCase().includes(typed));
    const options = fitting.slice(0, SUGGESTED).map((name) => element("option", { value: name }));
    find("known-classes").replaceChildren(...options);
  }

  #showClasses() {
    const items = this.classes.map((name) => {
      const button = element("button", { type: "button" }, `${readable(name)} ×`);
      button.setAttribute("aria-label", `Remove the class ${name}`);
      button.addEventListener("click", () => {
        this.classes = this.classes.filter((other) => other !== name);
        this.#showClasses();
        find("class").focus();
      });
      return element("li", {}, button);
    });
    find("classes").replaceChildren(...items);
  }
}

// By kind of argument: its field, and a function that reads it.
const KINDS = {
  number(kind, value) {
    const [min, max] = kind.limit;
    const field = element("input", { type: "number", step: kind.whole ? "1" : "any" });
    if (min !== null) field.min = min;
    if (max !== null) field.max = max;
    field.value = value;
    return [field, () => (Number.isNaN(field.valueAsNumber) ? undefined : field.valueAsNumber)];
  },
  enum(kind, value) {
    const field = element("select", {});
    kind.limit.forEach((word) => field.append(element("option", {}, word ?? "default")));
    field.selectedIndex = Math.max(0, kind.limit.indexOf(value));
    return [field, () => kind.limit[field.selectedIndex]];
  },
  boolean(kind, value) {
    const field = element("input", { type: "checkbox", checked: value });
    return [field, () => field.checked];
  },
  tuple(kind, value) {
    const text = Array.isArray(value) ? value.join(", ") : (value ?? "");
    const field = element("input", { type: "text", value: text, placeholder: "such as 3, 5, 5" });
    return [field, () => field.value];
  },
  string(kind, value) {
    const field = element("input", { type: "text", value });
    return [field, () => field.value];
  },
};
