// Runs before anything is drawn, so that a page that is to be dark is never light first.
"use strict";
const chosen = localStorage.getItem("aegis-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
