// Position-keyed noise and races (device/noise.py): one unit's functions of race.cpp, which is compiled by itself, since
// its bits must be the reference's and the compiler may contract no product and sum into one operation there.
#pragma once

#include "native.h"

#define RACE2(unit, name) unit##_##name
#define RACE1(unit, name) RACE2(unit, name)
#define RACE(name) RACE1(UNIT, name)

// The code of n weights whose weight over noise is largest, of equal ones the lower; 0 where none has a weight.
// key: the seed's low and high word, and the image.
int64_t RACE(race)(const float* weights, int64_t n, const int32_t* key, int64_t position);
// Weights over noise of all n codes, 0 where the weight is.
void RACE(perturb)(const float* weights, int64_t n, const int32_t* key, int64_t position, float* out);
