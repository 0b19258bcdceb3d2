/// What the codecs should give, computed the slow way: no bit tricks, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace oracle {

/// The magnitude that an e4m3 code stands for.
inline double fp8_value(int code) {
    const int exponent = code >> 3;
    const int mantissa = code & 7;
    return exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
}

/// The code nearest to a magnitude, by searching all of them; ties go to the even code.
inline int fp8_code(double magnitude) {
    int best = 0;
    for (int code = 1; code <= 0x7e; ++code) {
        const double closer = std::fabs(fp8_value(code) - magnitude);
        const double so_far = std::fabs(fp8_value(best) - magnitude);
        if (closer < so_far || (closer == so_far && code % 2 == 0)) {
            best = code;
        }
    }
    return best;
}

/// The value of 16 bits with `exponent_bits` of them exponent.
inline double value_of(std::uint16_t word, int exponent_bits) {
    const int mantissa_bits = 15 - exponent_bits;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const int exponent = (word & 0x7fff) >> mantissa_bits;
    const int mantissa = word & ((1 << mantissa_bits) - 1);
    double value = 0;
    if (exponent == (1 << exponent_bits) - 1) {
        value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
    } else if (exponent == 0) {
        value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
    } else {
        value = std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias - mantissa_bits);
    }
    return (word & 0x8000) != 0 ? -value : value;
}

}  // namespace oracle
