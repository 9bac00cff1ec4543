"""One offline HTML file about a run, or about two side by side.

content      what is shown, read from histories
chart        a curve chart as inline SVG
interactive  the numbers of a chart that a script draws
heatmap      a heat map as inline SVG
page         the HTML: it needs no network, and its policy allows no script but ours, and no network
"""
