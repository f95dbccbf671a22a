// Position-keyed noise and races (device/noise.py): one unit's functions of race.cpp, which is compiled by itself.
#pragma once

#include "native.h"

// The code of n weights whose weight over noise is largest, of equal ones the lower; 0 where none has a weight.
// key: the seed's low and high word, and the image.
int64_t OF_UNIT(race)(const float* weights, int64_t n, const int32_t* key, int64_t position);
// Weights over noise of all n codes, 0 where the weight is.
void OF_UNIT(perturb)(const float* weights, int64_t n, const int32_t* key, int64_t position, float* out);
