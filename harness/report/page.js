"use strict";
// Draws the figures from the JSON in the page, in the colours of page.css; sorts and filters the table of
// jobs. Loads nothing.
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  function coloured(value, style) {
    if (typeof value === "string") {
      const name = /^var\((--[\w-]+)\)$/.exec(value);
      return name ? style.getPropertyValue(name[1]).trim() : value;
    }
    if (Array.isArray(value)) return value.map((item) => coloured(item, style));
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, coloured(item, style)]));
    }
    return value;
  }

  const menuOf = (figure) => document.getElementById(figure.name + "-menu");
  const logOf = (figure) => document.getElementById(figure.name + "-log");
  let chosenJobs = [];

  function draw(figure) {
    const style = getComputedStyle(document.documentElement);
    const traces = coloured(figure.traces, style);
    const layout = coloured(figure.layout, style);
    const menu = menuOf(figure), log = logOf(figure);
    if (menu) {
      const shown = new Set(figure.choices[menu.selectedIndex].traces);
      traces.forEach((trace, index) => { trace.visible = shown.has(index); });
    }
    if (log) layout[figure.log_axis[1]].type = log.checked ? "log" : "linear";
    if (log && !log.checked) for (const key of ["dtick", "tickvals"]) delete layout[figure.log_axis[1]][key];
    if (figure.jobs) pointAt(figure, traces, menu);
    Plotly.react(figure.name, traces, layout, { displayModeBar: false, responsive: true });
  }

  // The last trace of a figure of jobs belongs to the jobs chosen in the table.
  function pointAt(figure, traces, menu) {
    const last = traces[traces.length - 1];
    const key = menu ? menu.selectedIndex + "/" : "";
    last.visible = true;
    last.x = []; last.y = [];
    for (const job of chosenJobs) {
      const place = figure.jobs[key + job];
      if (place) { last.x.push(...place[0], null); last.y.push(...place[1], null); }
    }
  }

  function drawAll() { figures.forEach(draw); }

  for (const figure of figures) {
    for (const control of [menuOf(figure), logOf(figure)]) {
      if (control) control.addEventListener("change", () => draw(figure));
    }
  }
  dark.addEventListener("change", drawAll);
  drawAll();

  const table = document.querySelector("table.jobs");
  if (table) {
    const body = table.tBodies[0];
    const rows = Array.from(body.rows);
    const filter = document.getElementById("filter");
    const count = document.getElementById("filter-count");
    const jobFigures = figures.filter((figure) => figure.jobs);

    const valueOf = (row, column) => {
      const cell = row.cells[column];
      const number = cell.dataset.value;
      if (number === "") return null;
      return number === undefined ? cell.textContent : Number(number);
    };

    function compare(a, b) {
      if (a === null || b === null) return a === b ? 0 : a === null ? Infinity : -Infinity;
      return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
    }

    Array.from(table.tHead.rows[0].cells).forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        table.querySelectorAll("th[aria-sort]").forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        rows.sort((one, two) => {
          const order = compare(valueOf(one, column), valueOf(two, column));
          return Math.abs(order) === Infinity ? order : down ? -order : order;  // what was not measured stays last
        });
        body.append(...rows);
      });
    });

    function choose(jobs) {
      if (jobs.join() === chosenJobs.join()) return;
      chosenJobs = jobs;
      jobFigures.forEach(draw);
    }

    function matching() {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      if (!words.length) return [];
      return rows.filter((row) => words.every((word) => row.textContent.toLowerCase().includes(word)));
    }

    function show() {
      const found = matching();
      const all = filter.value.trim() === "";
      rows.forEach((row) => { row.hidden = !all && !found.includes(row); });
      count.textContent = all ? rows.length + " jobs" : found.length + " of " + rows.length + " jobs, drawn in colour above";
      choose(found.map((row) => row.dataset.job));
    }

    filter.addEventListener("input", show);
    body.addEventListener("focusin", (event) => choose([event.target.closest("tr").dataset.job]));
    body.addEventListener("focusout", () => choose(matching().map((row) => row.dataset.job)));
    body.addEventListener("click", (event) => {
      const row = event.target.closest("tr");
      if (row) row.querySelector("a, button").focus();
    });
    show();
  }
  document.documentElement.dataset.drawn = "true";
})();
