"""`quintet view`: a local web application that shows runs while they train and afterwards."""
