"""One offline HTML file about a run, or about two side by side.

content   what is shown, read from histories
chart     a curve chart and a heat map as inline SVG
page      the HTML: no script, no network, and a policy in it that forbids both
"""
