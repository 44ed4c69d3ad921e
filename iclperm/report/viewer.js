"use strict";
// The prompts of an ordering, as they were scored, with each query's answer and scores. `promptViewer` returns what the
// rest of the page tells which ordering is picked, or null where the page holds no prompts. All texts are set as text.
const promptViewer = (() => {
  const AT_ONCE = 200;
  const made = (tag, text, kind) => {
    const found = document.createElement(tag);
    if (text !== undefined) found.textContent = text;
    if (kind) found.className = kind;
    return found;
  };
  const total = (steps) => steps.reduce((sum, step) => sum + step, 0);

  // Log-likelihoods lie in two bytes each, in steps below 0; the largest number is a missing one.
  const decoded = (text) => {
    const raw = atob(text), bytes = new Uint8Array(raw.length);
    for (let place = 0; place < raw.length; place += 1) bytes[place] = raw.charCodeAt(place);
    const view = new DataView(bytes.buffer);
    return (place) => view.getUint16(2 * place, true);
  };

  // The pieces of one prompt: { kind, tag, text, steps } in order.
  const piecesOf = (data, at, query) => {
    const shots = data.shots[at.shots], found = [];
    const group = data.groups.find((each) => each.shots.includes(shots));
    if (data.opening[0]) found.push({ kind: "opening", tag: "", text: data.opening[0], steps: data.opening[1] });
    const row_places = group.orders[at.place].slice(0, shots).map((place) => group.sets[at.set][place]);
    row_places.forEach((row, place) => {
      const [text, steps] = data.demonstrations[row];
      const own = place === 0 && data.first[row] ? data.first[row] : steps;
      found.push({ kind: "demonstration", tag: `${place + 1}`, text, steps: own });
    });
    const [text, steps] = data.queries[query];
    found.push({ kind: "query", tag: "Q", text, steps });
    return found;
  };

  // Where the tokens of a prompt end, counted from its beginning; null where that is not in the page.
  const endsOf = (data, at, query, pieces) => {
    if (!data.has_tokens || data.own === null) return null;
    const running = (steps, begin) => steps.map((step) => { begin += step; return begin; });
    const last = pieces[pieces.length - 1];
    const begin = pieces.reduce((sum, piece) => sum + piece.text.length, 0) - last.text.length;
    let context = null;
    if (data.own.context_of) {
      const number = data.own.context_of[at.set][at.place][at.shots];
      const whole = data.own.cells[`${number},${query}`];
      if (whole) return running(whole, 0);
      context = data.own.contexts[number] || null;
    }
    const ends = [];
    if (context) {
      ends.push(...running(context, 0));
    } else {
      let place = 0;
      for (const piece of pieces.slice(0, -1)) {
        ends.push(...running(piece.steps, place));
        place += piece.text.length;
      }
    }
    return [...ends, ...running(last.steps, begin)];
  };

  // A text from `begin` on, cut where tokens end; line ends are marked.
  const tokenised = (text, begin, ends) => {
    const found = document.createDocumentFragment(), end = begin + text.length;
    const cuts = ends.filter((place) => place > begin && place < end);
    let from = begin;
    for (const to of [...new Set(cuts), end]) {
      const number = ends.findIndex((place) => place >= to);
      const span = made("span", undefined, number % 2 ? "token odd" : "token");
      for (const [place, line] of text.slice(from - begin, to - begin).split("\n").entries()) {
        if (place) {
          const mark = made("span", "\u21b5", "mark");
          mark.setAttribute("aria-hidden", "true");
          span.append(mark, "\n");
        }
        span.append(line);
      }
      found.append(span);
      from = to;
    }
    return found;
  };

  return (explorer) => {
    const place = explorer.querySelector("script.prompts");
    if (!place) return null;
    const data = JSON.parse(place.textContent), main = JSON.parse(explorer.querySelector("script.data").textContent);
    data.shots = main.shots;
    const dialog = explorer.querySelector("dialog.viewer"), one = (name) => dialog.querySelector(name);
    const code_at = data.scores ? decoded(data.scores.codes) : null;
    const num_labels = data.labels.length, num_queries = data.queries.length;
    const name = `query-${explorer.dataset.number}`;
    let at = null, query = 0, shown = AT_ONCE, title = "";

    const answered = (number) => data.alphabet.indexOf(data.answers[at.shots][at.set][at.place][number]);
    // Each query has the labels of all, or choices of its own, of which several may be right.
    const rightOf = (number) => (data.choices ? data.choices[number].right : [data.gold[number]]);
    const afterOf = (number) => (data.choices ? data.choices[number].after : data.continuations);
    const labelsOf = (number) => (data.choices ? data.choices[number].after : data.labels);
    const scaleOf = (number) => (data.choices ? data.scores.scale[number] : data.scores.scale);
    const aloneOf = (number) => (data.choices ? data.scores.alone[number] : data.scores.alone);
    const isWrong = (number) => (num_labels ? !rightOf(number).includes(answered(number)) : answered(number) !== 0);
    const inWords = (number) => (answered(number) < 0 ? "no answer" : data.codes[answered(number)]);
    // The log-likelihood of each label, and what labels are compared by; null where there is no answer.
    const scores = (number) => {
      if (!data.scores) return null;
      const sets = data.groups[0].sets.length, places = main.permutations.length;
      const begin = (((at.shots * sets + at.set) * places + at.place) * num_queries + number) * num_labels;
      const codes = labelsOf(number).map((_, label) => code_at(begin + label));
      if (codes.includes(65535)) return null;
      const prior = data.scores.prior ? data.scores.prior[at.shots][at.set][at.place] : null;
      return codes.map((code, label) => {
        const logprob = -code * data.scores.step;
        const less = (prior ? prior[label] : 0) + (data.scores.alone ? aloneOf(number)[label] : 0);
        return { label, logprob, score: logprob / scaleOf(number)[label] - less };
      });
    };
    const margin = (number) => {
      const found = data.has_margins ? scores(number) : null;
      if (!found) return Infinity;
      const [best, second] = found.map((each) => each.score).sort((a, b) => b - a);
      return best - second;
    };

    const verdict = () => {
      const right = num_labels ? data.labels[data.gold[query]] : data.right[query];
      const text = answered(query) < 0 ? "No answer" : `Answered ${inWords(query)}`;
      const whole = num_labels && !isWrong(query) ? `${text}, which is right` : `${text}; right is ${right}`;
      return made("p", `Query ${data.numbers[query]}. ${whole}`, isWrong(query) ? "verdict is-wrong" : "verdict");
    };
    const scoreTable = () => {
      const found = scores(query), table = made("table"), head = made("tr");
      table.append(made("caption", "Scores of the labels", "unseen"), made("thead"), made("tbody"));
      const columns = ["label", "log-likelihood, nats", ...(data.unit ? [data.unit] : []), "share"];
      for (const column of columns) {
        const cell = made("th", column, column === "label" ? "words" : "");
        cell.scope = "col";
        head.append(cell);
      }
      table.tHead.append(head);
      const best = Math.max(...found.map((each) => each.score));
      const sum = total(found.map((each) => Math.exp(each.score - best)));
      for (const { label, logprob, score } of found) {
        const line = made("tr", undefined, label === answered(query) ? "best" : ""), cell = made("th", labelsOf(query)[label]);
        const signs = [label === answered(query) ? "answered" : "", rightOf(query).includes(label) ? "right" : ""];
        cell.scope = "row";
        if (signs.some(Boolean)) cell.append(" ", made("span", signs.filter(Boolean).join(", "), "sign"));
        const share = `${(100 * Math.exp(score - best) / sum).toFixed(1)}`, bar = made("td", undefined, "share");
        const drawn = made("span", undefined, "bar"), filled = made("span");
        filled.style.width = `${share}%`;
        const measure = made("span", undefined, "measure");
        drawn.append(filled);
        measure.append(drawn, made("span", `${share} %`));
        bar.append(measure);
        line.append(cell, made("td", logprob.toFixed(3)));
        if (data.unit) line.append(made("td", score.toFixed(3)));
        line.append(bar);
        table.tBodies[0].append(line);
      }
      return table;
    };
    const showScores = () => {
      const parts = [verdict()];
      if (scores(query)) parts.push(scoreTable());
      if (margin(query) < Infinity) parts.push(made("p", `The best two are ${margin(query).toFixed(3)} nats apart.`, "foot"));
      one(".scores").replaceChildren(...parts);
    };

    const showPrompt = () => {
      const pieces = piecesOf(data, at, query), ends = endsOf(data, at, query, pieces);
      const is_cut = ends !== null && one(".show-tokens").checked;
      const list = made("ol", undefined, "parts");
      let begin = 0;
      pieces.forEach((piece, place) => {
        const item = made("li", undefined, `part ${piece.kind}`), said = made("div", undefined, "said");
        const tag = made("span", piece.tag, "tag");
        const about = { opening: "Instruction", query: `Query ${data.numbers[query]}` }[piece.kind];
        tag.setAttribute("aria-hidden", "true");
        item.append(tag, made("span", about || `Demonstration ${piece.tag}`, "unseen"), said);
        said.dir = "auto";
        if (place === 0) data.start.forEach((token) => said.append(made("span", token, "special")));
        said.append(is_cut ? tokenised(piece.text, begin, ends) : piece.text);
        if (piece.kind === "query" && num_labels && answered(query) >= 0 && afterOf(query).length) {
          const text = afterOf(query)[answered(query)] || "";
          if (text) said.append(made("span", text, isWrong(query) ? "next is-wrong" : "next"));
        }
        list.append(item);
        begin += piece.text.length;
      });
      one(".prompt").replaceChildren(list);
      const count = ends === null ? "" : `${(ends.length + data.start.length).toLocaleString("en")} tokens, `;
      one(".told").textContent = `${count}${begin.toLocaleString("en")} characters up to the label`;
      one(".tokens-part").hidden = ends === null;
      one(".command").textContent = `${data.is_likeness ? "The API renders the chat; its turns are marked here by <|role|>. " : ""}`
        + `To take it away: iclperm prompt FOLDER --set ${at.set} --permutation ${main.permutations[at.place]} `
        + `--shots ${data.shots[at.shots]} --query ${data.numbers[query]}`;
    };

    const found = () => {
      const near = one(".only-near").checked ? Number(one(".near").value) || 0 : Infinity;
      return data.queries.map((_, number) => number).filter((number) => (
        (!one(".only-wrong").checked || isWrong(number)) && (near === Infinity || margin(number) < near)));
    };
    // All queries begin and end alike; the row of one shows the words in which it differs.
    const alike = (letter) => {
      const texts = num_queries > 1 ? data.queries.map(([text]) => text) : [""];
      const most = Math.min(...texts.map((text) => text.length));
      let length = 0;
      while (length < most && texts.every((text) => letter(text, length) === letter(texts[0], length))) length += 1;
      return length;
    };
    const begins = alike((text, place) => text[place]), ends = alike((text, place) => text[text.length - 1 - place]);
    const showList = () => {
      const numbers = found();
      if (numbers.length && !numbers.includes(query)) [query] = numbers;
      while (shown < numbers.length && numbers.indexOf(query) >= shown) shown += AT_ONCE;
      one(".choices").replaceChildren(...numbers.slice(0, shown).map((number) => {
        const label = made("label", undefined, "choice"), box = made("input");
        box.type = "radio";
        box.name = name;
        box.value = number;
        box.checked = number === query;
        const [text] = data.queries[number], words = made("span", text.slice(begins, text.length - ends) || text, "words");
        words.dir = "auto";
        label.append(box, made("span", data.numbers[number], "number"), words,
          made("span", inWords(number), isWrong(number) ? "answer is-wrong" : "answer"));
        return label;
      }));
      one(".more").hidden = numbers.length <= shown;
      const wrong = data.queries.filter((_, number) => isWrong(number)).length;
      one(".found").textContent = numbers.length
        ? `${numbers.length} of ${num_queries} queries; ${wrong} of all not answered right`
        : `none of ${num_queries} queries; the last one stays`;
    };
    const showAll = () => {
      if (!dialog.open) return;
      one(".viewer-title").textContent = title;
      showList();
      showScores();
      showPrompt();
    };

    one(".near").value = data.near;
    one(".near-part").hidden = !data.has_margins;
    one(".filters").addEventListener("input", () => { shown = AT_ONCE; showAll(); });
    one(".choices").addEventListener("change", (event) => {
      query = Number(event.target.value);
      showScores();
      showPrompt();
      one(".viewer-prompt").scrollTop = one(".viewer-prompt").scrollHeight;  // where it scrolls by itself
    });
    one(".more").addEventListener("click", () => { shown += AT_ONCE; showList(); });
    one(".show-tokens").addEventListener("change", showPrompt);
    one(".close").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    const open = () => {
      dialog.showModal();
      showAll();
      const chosen = one(".choices input:checked");
      if (chosen) {
        chosen.focus({ preventScroll: true });
        one(".choices").scrollTop = chosen.closest("label").offsetTop - one(".choices").offsetTop - 40;
      }
    };
    explorer.querySelector(".open-prompt").addEventListener("click", open);
    return { open, at: (picked, words) => { at = { ...picked }; title = words; showAll(); } };
  };
})();
