'use strict';

/* What pointing at strips and at pictures of layers does, and clicking on them. */

/** A click on a strip goes to the strongest token there, and pointing names it. */
function listenToStrips(field) {
  const found = (event) => {
    const canvas = event.target.closest('label > canvas');
    if (!canvas) return null;
    const own = views[canvas.parentElement.control.value];
    return { own, index: stripIndex(canvas, event, shadesOf(own)) };
  };
  field.addEventListener('click', (event) => {
    const at = found(event);
    if (at) act('jump', at.index);
  });
  field.addEventListener('pointermove', (event) => {
    const at = found(event);
    if (!at || event.pointerType === 'touch') return;
    const { own, index } = at;
    showTip(boxOf(event), [`Token ${index} “`, named(example().tokens[index]), `”: ${short(own.values[index])}`]);
  });
  field.addEventListener('pointerleave', hideTip);
}

/** What is said of a cell of the map, and its token. */
function mapCell(canvas, event) {
  const map = usableMap();
  if (!map) return null;
  const [row, column] = cellAt(canvas, event, map.size, map.size);
  const names = example().tokens;
  const said = `: token ${row} “${names[row]}” takes ${short(map.row(row)[column])} from token ${column} “${names[column]}”`;
  return { index: row, said: `Layer ${map.facts.index}${said}` };
}

/** What is said of what enters a layer at a token, and both. */
function enteringCell(canvas, event) {
  const [row, index] = cellAt(canvas, event, entering.layers, entering.size);
  const layer = entering.layers - 1 - row;
  return { index, layer, said: `Enters layer ${layer} at token ${index} “${example().tokens[index]}”: ${short(entering.at(layer, index))}` };
}

/** Pointing at a picture is pointing at its token; a click keeps that, and chooses the layer. */
function listenToChart(chart, cell) {
  const canvas = chart.querySelector('canvas');
  canvas.addEventListener('pointermove', (event) => {
    const at = cell(canvas, event);
    if (at) act('point', at.index, { box: boxOf(event), content: [at.said] });
  });
  canvas.addEventListener('pointerleave', () => act('point', null));
  canvas.addEventListener('click', (event) => {
    const at = cell(canvas, event);
    if (!at) return;
    const place = layers.findIndex(({ facts }) => facts.index === at.layer);
    if (place >= 0) chooseLayer(place);
    if (chosen.kept !== at.index) act('jump', at.index);
  });
}
