"use strict";
// Draws the page's charts and shows what is known of the ordering that is picked. All texts are set as text, never as
// markup. Vega interprets its expressions (ast), since the page's policy forbids to evaluate any.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const read = (place) => JSON.parse(place.textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // A specification with its named data put in.
  const filled = (specification, data) => ({ ...specification, layer: specification.layer.map((layer) => (
    layer.data && data[layer.data.name] ? { ...layer, data: { ...layer.data, values: data[layer.data.name] } } : layer
  )), ...(specification.data && data[specification.data.name]
    ? { data: { ...specification.data, values: data[specification.data.name] } } : {}),
  ...(specification.params ? { params: specification.params.map((each) => (
    each.name in data ? { ...each, value: data[each.name] } : each)) } : {}) });

  const embed = (place, specification) => {
    const ink = colour("--ink"), soft = colour("--soft"), line = colour("--line");
    const font = "system-ui, sans-serif";
    return window.vegaEmbed(place, specification, {
      mode: "vega-lite", ast: true, actions: false, renderer: "svg", defaultStyle: false,
      tooltip: { disableDefaultStyle: true },
      loader: { load: () => Promise.reject(new Error("this page loads nothing")) },
      config: {
        font, background: "transparent", view: { stroke: null },
        axis: { labelColor: soft, titleColor: soft, gridColor: line, domainColor: soft, tickColor: soft,
          labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500, labelFont: font, titleFont: font },
        legend: { labelColor: soft, titleColor: soft, labelFontSize: 12, titleFontSize: 12, titleFontWeight: 500,
          labelFont: font, titleFont: font },
        text: { color: ink, font },
      },
    }).then((result) => {
      place.parentElement.classList.add("has-chart");
      return result.view;
    });
  };
  const failed = (figure) => (error) => {  // the picture takes the chart's place again
    figure.classList.remove("has-chart");
    console.error(error);
  };
  const redrawn = (draw) => {
    draw();
    dark.addEventListener("change", draw);
  };
  const made = (tag, text, kind) => {
    const found = document.createElement(tag);
    if (text !== undefined) found.textContent = text;
    if (kind) found.className = kind;
    return found;
  };

  const explorers = {};  // what opens a prompt of each, by its name
  for (const explorer of document.querySelectorAll(".explorer")) {
    const data = read(explorer.querySelector("script.data"));
    const form = explorer.querySelector("form"), panel = explorer.querySelector(".panel");
    const last = data.shots.length - 1;
    const views = {};
    const viewer = promptViewer(explorer);
    const title = panel.querySelector(".picked"), under = `h${Number(title.tagName[1]) + 1}`;
    let onlyWrong = false, isOpen = false;
    const at = { set: 0, place: 0, shots: last };
    const accuracy = (set, place, shots) => data.accuracy[set][place][shots] / 10000;
    const cells = (shots) => data.accuracy.flatMap((of_set, set) => of_set.map((values, place) => (
      { set, place, permutation: data.permutations[place], accuracy: values[shots] / 10000 })));
    const extreme = (sign) => cells(at.shots).reduce((one, other) => (
      sign * other.accuracy > sign * one.accuracy ? other : one));

    const heat = () => {
      const found = cells(at.shots), values = found.map((cell) => cell.accuracy);
      const low = Math.min(...values), bright = low + 0.6 * (Math.max(...values) - low);
      return found.map((cell) => ({ ...cell, is_bright: cell.accuracy > bright }));
    };
    const lines = () => {
      const found = [], step = Math.ceil(data.accuracy.length * data.permutations.length / data.most_lines);
      data.accuracy.forEach((of_set, set) => of_set.forEach((values, place) => {
        const ordering = set * of_set.length + place;
        if (ordering % step && !(set === at.set && place === at.place)) return;
        values.forEach((value, shots) => found.push({ ordering, set, place, permutation: data.permutations[place],
          shots: data.shots[shots], at_shots: shots, accuracy: value / 10000 }));
      }));
      return found;
    };
    const marked = () => {
      for (const [name, view] of Object.entries(views)) {
        view.signal("picked_set", at.set).signal("picked_permutation", data.permutations[at.place]);
        if (name === "heat") view.data("cells", heat());
        if (name === "curves") view.data("lines", lines());
        view.runAsync();
      }
    };

    const confusion = (answers) => {
      const names = data.codes, counts = data.labels.map(() => names.map(() => 0));
      data.gold.forEach((gold, query) => {
        const code = data.alphabet.indexOf(answers[query]);
        if (code >= 0) counts[gold][code] += data.weights[query];
      });
      const table = made("table", undefined, "confusion"), head = made("tr");
      const again = data.weights.some((weight) => weight > 1) ? "; some queries count several times" : "";
      table.append(made("caption", `Right label by row, answered label by column${again}`));
      head.append(made("td"));
      const used = names.map((_, code) => code < data.labels.length || counts.some((row) => row[code]));
      names.forEach((name, code) => {
        if (!used[code]) return;
        const cell = made("th", name);
        cell.scope = "col";
        head.append(cell);
      });
      table.append(made("thead"), made("tbody"));
      table.tHead.append(head);
      counts.forEach((row, gold) => {
        const line = made("tr"), name = made("th", data.labels[gold]);
        name.scope = "row";
        line.append(name);
        row.forEach((count, code) => used[code] && line.append(made("td", count, gold === code ? "right" : "")));
        table.tBodies[0].append(line);
      });
      const scroll = made("div", undefined, "scroll");
      scroll.tabIndex = 0;
      scroll.setAttribute("role", "region");
      scroll.setAttribute("aria-label", "Confusion of the picked ordering");
      scroll.append(table);
      return scroll;
    };
    const isWrong = (answers, query) => {
      const code = data.alphabet.indexOf(answers[query]);
      return data.labels.length ? code !== data.gold[query] : code !== 0;
    };
    const queries = (answers) => {
      const part = made("details", undefined, "queries-part"), label = made("label"), box = made("input");
      box.type = "checkbox";
      box.checked = onlyWrong;
      label.append(box, data.measure ? "answers below the full grade only" : "wrong answers only");
      const list = made("ol", undefined, "queries"), told = made("p", undefined, "foot");
      const fill = () => {
        const found = data.queries.map((_, query) => query).filter((query) => !onlyWrong || isWrong(answers, query));
        list.replaceChildren(...found.slice(0, data.most_queries).map((query) => {
          const item = made("li"), code = data.alphabet.indexOf(answers[query]);
          item.value = query;
          const text = made("span", data.queries[query]);
          text.dir = "auto";
          const answer = code < 0 ? "no answer" : data.codes[code];
          const right = data.labels.length ? `right ${data.labels[data.gold[query]]}, answered ${answer}` : answer;
          item.append(text, " ", made("span", right, isWrong(answers, query) ? "label is-wrong" : "label"));
          return item;
        }));
        told.textContent = `${Math.min(found.length, data.most_queries)} of ${found.length} shown`;
      };
      box.addEventListener("change", () => {
        onlyWrong = box.checked;
        fill();
      });
      fill();
      part.open = isOpen;
      part.addEventListener("toggle", () => { isOpen = part.open; });
      const wrong = data.queries.filter((_, query) => isWrong(answers, query)).length;
      part.append(made("summary", `Queries: ${wrong} of ${data.queries.length} not answered ${data.measure ? "with the full grade" : "right"}`), label, list, told);
      return part;
    };

    const show = () => {
      const { set, place, shots } = at, here = accuracy(set, place, shots), k = data.shots[shots];
      const all = cells(shots), better = all.filter((cell) => cell.accuracy > here).length;
      title.textContent =
        `${data.measure ? `${data.measure} ${(100 * here).toFixed(1)} %` : `${(100 * here).toFixed(1)} % right`}: set ${set}, permutation ${data.permutations[place]}, k = ${k}`;
      panel.querySelector(".rank").textContent = `${better || "none"} of the ${all.length} orderings at this k ${better > 1 ? "are" : "is"} better`;
      const chosen = data.chosen && shots === last ? data.chosen : null;
      if (chosen && set === chosen.set && place === chosen.place) {
        panel.querySelector(".rank").textContent += `. Recommended: ${chosen.words}`;
      } else if (chosen && chosen.is_held_out && !better) {
        panel.querySelector(".rank").textContent +=
          ", on the queries that it would be chosen by: part of its lead is luck. The study recommends another";
      }
      const inside = panel.querySelector(".inside");
      inside.replaceChildren();
      const rows = data.orders === null ? null : data.orders[place].map((index) => data.rows[set][index]).slice(0, k);
      if (rows === null || data.reason) inside.append(made("p", data.reason, "foot"));
      if (rows !== null && rows.length) {
        const list = made("ol", undefined, "demonstrations");
        rows.forEach((row) => {
          const item = made("li"), text = made("span", data.texts === null ? `row ${data.row_numbers[row]}` : data.texts[row]);
          text.dir = "auto";
          if (data.labels.length) item.append(made("span", data.labels[data.row_labels[row]], "label"), " ");
          item.append(text);
          list.append(item);
        });
        inside.append(made(under, "Demonstrations, in the order of the prompt"), list);
      }
      const answers = data.answers && data.answers[shots] ? data.answers[shots][set][place] : null;
      if (answers !== null && data.labels.length) inside.append(made(under, "Confusion"), confusion(answers));
      if (answers !== null && data.queries) inside.append(queries(answers));
      form.elements.set.selectedIndex = set;
      form.elements.permutation.selectedIndex = place;
      form.elements.shots.selectedIndex = shots;
      if (viewer) viewer.at(at, title.textContent);
      marked();
    };
    const pick = (cell) => {
      at.set = cell.set;
      at.place = cell.place;
      if (cell.at_shots !== undefined) at.shots = cell.at_shots;  // of a point of a curve
      show();
    };

    const found_at = (prompt) => ({ set: prompt.set, place: data.permutations.indexOf(prompt.permutation),
      at_shots: data.shots.indexOf(prompt.shots) });
    explorers[explorer.dataset.name] = {
      has: (prompt) => {
        const { set, place, at_shots } = found_at(prompt);
        return set < data.accuracy.length && place >= 0 && at_shots >= 0;
      },
      open: (prompt) => {
        pick(found_at(prompt));
        if (viewer) {
          viewer.open();
        } else {  // a page without texts: what is known of the ordering
          title.tabIndex = -1;
          title.focus();
          panel.scrollIntoView();
        }
      },
    };

    form.hidden = panel.hidden = false;
    explorer.classList.add("has-panel");
    form.addEventListener("submit", (event) => event.preventDefault());
    form.addEventListener("change", () => {
      at.set = form.elements.set.selectedIndex;
      at.place = form.elements.permutation.selectedIndex;
      at.shots = form.elements.shots.selectedIndex;
      show();
    });
    const recommended = () => ({ set: data.chosen.set, place: data.chosen.place, at_shots: last });
    for (const button of form.querySelectorAll("button")) {
      if (button.dataset.go === "chosen") button.hidden = !data.chosen;
      button.addEventListener("click", () => pick(button.dataset.go === "chosen"
        ? recommended() : extreme(button.dataset.go === "best" ? 1 : -1)));
    }
    pick(data.chosen ? recommended() : extreme(1));

    const means = () => {
      const count = data.accuracy.length * data.permutations.length;
      return data.shots.map((k, shots) => (
        { shots: k, accuracy: cells(shots).reduce((sum, cell) => sum + cell.accuracy, 0) / count }));
    };
    const draw = (name) => {
      const place = explorer.querySelector(`.chart.${name}`);
      if (!place || !window.vegaEmbed) return;
      const [specification] = read(explorer.querySelector(`script.${name}-chart`));
      redrawn(() => {
        const figure = place.parentElement;
        figure.hidden = false;
        figure.classList.add("has-chart");  // before drawing, for its width
        const now = filled(specification, { picked_set: at.set, picked_permutation: data.permutations[at.place],
          ...(name === "heat" ? { cells: heat() } : { lines: lines(), means: means() }) });
        embed(place, now).then((view) => {
          views[name] = view;
          view.addEventListener("click", (_, item) => {
            if (item && item.datum && item.datum.place !== undefined) pick(item.datum);
          });
          marked();
        }).catch(failed(figure));
      });
    };
    explorer.querySelectorAll("figcaption .needs-script").forEach((each) => { each.hidden = !window.vegaEmbed; });
    draw("heat");
    draw("curves");
  }

  // Figures of all orderings: a point that stands for one prompt opens it, with the mouse or from a list of them.
  const rows_of = (found) => (Array.isArray(found) ? found.flatMap(rows_of)
    : found && typeof found === "object" ? (found.prompt ? [found] : Object.values(found).flatMap(rows_of)) : []);
  const opened = (prompt) => {
    const explorer = explorers[prompt.run];
    if (explorer && explorer.has(prompt)) explorer.open(prompt);
  };
  for (const place of document.querySelectorAll(".chart.free")) {
    const [specification] = read(place.querySelector("script")), form = place.parentElement.querySelector(".points");
    const rows = rows_of(specification).filter(({ prompt }) => explorers[prompt.run] && explorers[prompt.run].has(prompt));
    if (window.vegaEmbed) redrawn(() => {
      place.parentElement.classList.add("has-chart");  // before drawing, for its width
      embed(place, specification).then((view) => view.addEventListener("click", (_, item) => {
        if (item && item.datum && item.datum.prompt) opened(item.datum.prompt);
      })).catch(failed(place.parentElement));
    });
    if (!rows.length) continue;
    form.hidden = false;
    form.elements.point.append(...rows.map((row) => made("option", row.words)));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      opened(rows[form.elements.point.selectedIndex].prompt);
    });
  }
})();
