"""The colours of the house, for plots and films alike."""

# Okabe and Ito's colours, told apart by all kinds of eyes; styles and markers tell them apart in grey.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B0568A", "#8A6A00", "#333333", "#3B9BD1")
INK, SOFT = "#1b1b1b", "#595959"
