// The leaderboard's table: a click on a heading sorts by it, a second click turns the order round; the filters hide rows.
(function () {
  "use strict";

  function start(board) {
    var table = board.querySelector("table");
    var body = table.tBodies[0];
    var rows = Array.prototype.slice.call(body.rows);
    var filters = board.querySelector(".board-filters");
    var task = board.querySelector("[name=task]");
    var certified = board.querySelector("[name=certified]");
    var agent = board.querySelector("[name=agent]");
    var count = board.querySelector("[name=count]");
    var headings = Array.prototype.slice.call(table.tHead.rows[0].cells);

    function filter() {
      var words = agent.value.toLowerCase();
      var shown = 0;
      rows.forEach(function (row) {
        var fits =
          (task.value === "" || row.dataset.task === task.value) &&
          (!certified.checked || row.dataset.certified === "yes") &&
          row.cells[1].dataset.value.indexOf(words) !== -1;
        row.hidden = !fits;
        shown += fits ? 1 : 0;
      });
      count.textContent = shown + " of " + rows.length + " entries";
    }

    // Numbers by size, the largest first at the first click; words by the alphabet. Rows that are equal stay as they were.
    function sort(column) {
      var heading = headings[column];
      var values = rows.map(function (row) { return row.cells[column].dataset.value; });
      var numeric = values.every(function (value) { return value !== "" && !isNaN(value); });
      var falling = heading.getAttribute("aria-sort") === "ascending" || (numeric && column > 0 && !heading.hasAttribute("aria-sort"));
      headings.forEach(function (other) { other.removeAttribute("aria-sort"); });
      heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
      rows.sort(function (one, other) {
        var a = one.cells[column].dataset.value, b = other.cells[column].dataset.value;
        var order = numeric ? Number(a) - Number(b) : a.localeCompare(b);
        return falling ? -order : order;
      });
      rows.forEach(function (row) { body.appendChild(row); });
    }

    headings.forEach(function (heading, column) {
      heading.querySelector("button").addEventListener("click", function () { sort(column); });
    });
    [task, certified, agent].forEach(function (control) { control.addEventListener("input", filter); });
    filters.hidden = false;
    filter();
  }

  function startAll() {
    Array.prototype.forEach.call(document.querySelectorAll(".board"), start);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", startAll);
  else startAll();
})();
