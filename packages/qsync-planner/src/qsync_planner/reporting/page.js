// Draws the charts of a page.  vegaEmbed comes with the bundle that this is put into.
for (const figure of document.querySelectorAll("figure.chart")) {
  const chart = JSON.parse(figure.querySelector("script").textContent);
  const place = figure.querySelector(".drawing");
  vegaEmbed(place, chart, {
    renderer: "svg",
    actions: false,
    defaultStyle: false,
    ast: true, // an interpreter for expressions: the page's policy forbids eval
    tooltip: { disableDefaultStyle: true },
    loader: { target: "_self" },
  }).then(
    () => (figure.dataset.drawn = "yes"),
    (error) => {
      figure.dataset.drawn = "no";
      place.textContent = `This chart could not be drawn: ${error.message}`;
      console.error(error);
    },
  );
}
