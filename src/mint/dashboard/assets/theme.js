// Sets the chosen theme before the first paint. A classic script, because modules run later. Knows nothing of pages.
{
  const root = document.documentElement;
  root.classList.add("js");
  try {
    const theme = localStorage.getItem("mint-theme");
    if (theme === "light" || theme === "dark") root.dataset.theme = theme;
  } catch {
    // Storage may be forbidden; then the system's theme is used.
  }
}
