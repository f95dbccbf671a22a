// Weights in fewer bits: one unit's function of copy.cpp, which is compiled by itself (native.h, OF_UNIT).
#pragma once

#include "native.h"

void OF_UNIT(copy)(const Copy&);
