"""One optimizer under watch: its hooks, which steps are looked at whole, and which losses look odd."""
