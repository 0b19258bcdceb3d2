/// The codecs' arithmetic on single values, one source for host and device. What both produce is
/// equal bit for bit as long as neither contracts `a * b + c` (`-ffp-contract=off`,
/// `--fmad=false`).
///
/// Everything selects instead of branching and no operand that matters is a denormal number, so
/// that loops over these functions vectorise and a processor that flushes denormals gets the same
/// bytes.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define OFFLOAD_HD __host__ __device__ __forceinline__
#else
#define OFFLOAD_HD inline __attribute__((always_inline))
#endif

namespace offload::codec {

constexpr int kBlock = 128;  // values that share one scale

OFFLOAD_HD std::int32_t to_bits(float value) {
    std::int32_t bits = 0;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

OFFLOAD_HD float from_bits(std::int32_t bits) {
    float value = 0;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

OFFLOAD_HD std::int32_t smaller(std::int32_t a, std::int32_t b) { return a < b ? a : b; }
OFFLOAD_HD std::int32_t larger(std::int32_t a, std::int32_t b) { return a > b ? a : b; }

constexpr std::int32_t kMagnitudeMask = 0x7fffffff;
constexpr std::int32_t kExponentMask = 0x7f800000;  // also the bits of infinity
constexpr std::int32_t kQuietNan = 0x7fc00000;

/// The element types: `Word` holds a value's bits, `Signed` is as wide and compares magnitudes.
/// `narrow` rounds to nearest, ties to even; a NaN given to it must be `kQuietNan` with any sign.
struct Float32 {
    using Word = std::uint32_t;
    using Signed = std::int32_t;
    static constexpr Signed kMagnitude = 0x7fffffff;
    static constexpr Signed kInfinity = 0x7f800000;

    static OFFLOAD_HD float widen(Word word) { return from_bits(static_cast<std::int32_t>(word)); }
    static OFFLOAD_HD Word narrow(float value) { return static_cast<Word>(to_bits(value)); }
};

struct BFloat16 {
    using Word = std::uint16_t;
    using Signed = std::int16_t;
    static constexpr Signed kMagnitude = 0x7fff;
    static constexpr Signed kInfinity = 0x7f80;

    static OFFLOAD_HD float widen(Word word) {
        return from_bits(static_cast<std::int32_t>(static_cast<std::uint32_t>(word) << 16));
    }

    /// The word is in the upper half.
    static OFFLOAD_HD std::uint32_t rounded(float value) {
        const auto bits = static_cast<std::uint32_t>(to_bits(value));
        return bits + 0x7fff + ((bits >> 16) & 1);
    }

    static OFFLOAD_HD Word narrow(float value) { return static_cast<Word>(rounded(value) >> 16); }
};

struct Float16 {
    using Word = std::uint16_t;
    using Signed = std::int16_t;
    static constexpr Signed kMagnitude = 0x7fff;
    static constexpr Signed kInfinity = 0x7c00;
    static constexpr std::int32_t kSmallestNormal = 0x38800000;  // 2^-14
    static constexpr std::int32_t kHalf = 0x3f000000;            // its last bit is worth 2^-24
    static constexpr std::int32_t kRoundsToInfinity = 0x477ff000;
    static constexpr std::int32_t kRebias = 112 << 23;

    static OFFLOAD_HD float widen(Word word) {
        const std::int32_t magnitude = (word & 0x7fff) << 13;
        const std::int32_t sign = static_cast<std::int32_t>((word & 0x8000u) << 16);
        const std::int32_t denormal =
            to_bits(from_bits(magnitude + kSmallestNormal) - from_bits(kSmallestNormal));
        const std::int32_t normal = magnitude + kRebias;
        const std::int32_t special = magnitude + 2 * kRebias;
        std::int32_t bits = (word & 0x7fff) < 0x0400 ? denormal : normal;
        bits = (word & 0x7fff) >= kInfinity ? special : bits;
        return from_bits(bits | sign);
    }

    static OFFLOAD_HD Word narrow(float value) {
        const std::int32_t bits = to_bits(value);
        const std::int32_t magnitude = bits & kMagnitudeMask;
        const std::int32_t denormal = to_bits(from_bits(magnitude) + from_bits(kHalf)) - kHalf;
        const std::int32_t normal = (magnitude - kRebias + 0xfff + ((magnitude >> 13) & 1)) >> 13;
        std::int32_t half = magnitude < kSmallestNormal ? denormal : normal;
        half = magnitude >= kRoundsToInfinity ? kInfinity : half;
        half = magnitude > kExponentMask ? 0x7e00 : half;
        return static_cast<Word>(half | ((bits >> 16) & 0x8000));
    }
};

/// Magnitude of a finite value as an integer that orders like it; 0 for Inf and NaN.
template <typename Type>
OFFLOAD_HD typename Type::Signed finite_magnitude(typename Type::Word word) {
    using Signed = typename Type::Signed;
    const Signed magnitude = static_cast<Signed>(word & Type::kMagnitude);
    return magnitude < Type::kInfinity ? magnitude : Signed{0};
}

template <typename Type>
OFFLOAD_HD bool is_nan(typename Type::Word word) {
    return static_cast<typename Type::Signed>(word & Type::kMagnitude) > Type::kInfinity;
}

/// What one block is multiplied by: `inverse` on the way in, the stored `scale` on the way out.
struct BlockScale {
    float inverse;
    float scale;
};

/// The largest magnitude that a scale is made for is one step below the largest float32, since
/// 127 * (amax / 127) may round up. The smallest is 2^-100: with it neither `inverse` overflows nor
/// is any scale or decoded value a denormal float32.
constexpr float kLargestAmax = 0x1.fffffcp127f;
constexpr float kSmallestAmax = 0x1p-100f;

/// `limit` is the largest magnitude that the code represents.
OFFLOAD_HD BlockScale block_scale(float amax, float limit) {
    const float lower = amax < kSmallestAmax ? kSmallestAmax : amax;
    const float clamped = lower > kLargestAmax ? kLargestAmax : lower;
    return {limit / clamped, clamped / limit};
}

/// A random number generator without state: the bits depend on the seed, the block's index and the
/// lane in it. Splitmix64's finaliser makes a key for each block, murmur3's 32-bit one the lanes'.
OFFLOAD_HD std::uint64_t random_key(std::uint64_t seed, std::int64_t block) {
    std::uint64_t key = seed + (static_cast<std::uint64_t>(block) + 1) * 0x9e3779b97f4a7c15u;
    key = (key ^ (key >> 30)) * 0xbf58476d1ce4e5b9u;
    key = (key ^ (key >> 27)) * 0x94d049bb133111ebu;
    return key ^ (key >> 31);
}

/// Uniform in [0, 1) in steps of 2^-24.
OFFLOAD_HD float random_uniform(std::uint64_t key, std::int32_t lane) {
    auto bits = static_cast<std::uint32_t>(key) + static_cast<std::uint32_t>(lane) * 0x9e3779b9u;
    bits = (bits ^ (bits >> 16)) * 0x85ebca6bu;
    bits = (bits ^ (bits >> 13)) * 0xc2b2ae35u;
    bits ^= (bits >> 16) ^ static_cast<std::uint32_t>(key >> 32);
    return static_cast<float>(static_cast<std::int32_t>(bits >> 8)) * 0x1p-24f;
}

/// Rounds a non-negative number below 2^23 down, or up with the probability of its fraction.
OFFLOAD_HD std::int32_t round_randomly(float value, float uniform) {
    const std::int32_t floor = static_cast<std::int32_t>(value);
    return floor + (uniform < value - static_cast<float>(floor) ? 1 : 0);
}

/// fp8: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; 448 is the largest value, 2^-9 the
/// smallest, 0x7f is NaN and there is no infinity.
///
/// A code's magnitude is eight times the index of its binade plus the value in steps of an eighth
/// of that binade. Below 2^-6 the steps stay those of the lowest binade, so denormals are no case
/// of their own.
struct Fp8 {
    static constexpr float kLimit = 448.0f;
    static constexpr std::int32_t kLimitBits = 0x43e00000;
    static constexpr std::int32_t kSmallestNormal = 0x3c800000;  // 2^-6
    static constexpr std::int32_t kNan = 0x7f;
    static constexpr int kShift = 20;  // mantissa bits of float32 that a code drops

    static OFFLOAD_HD std::int32_t binade(std::int32_t magnitude) {
        return larger(magnitude & kExponentMask, kSmallestNormal);
    }

    /// The code, `kShift` bits to the left, of at most `kLimit` (or so little more that it rounds
    /// there). Adding a number whose last bit is one step lets the addition round to even.
    static OFFLOAD_HD std::uint32_t nearest_shifted(std::int32_t magnitude) {
        const std::int32_t low = binade(magnitude);
        const std::int32_t aligned = low + (kShift << 23);
        const std::int32_t sum = to_bits(from_bits(magnitude) + from_bits(aligned));
        return (static_cast<std::uint32_t>(sum) << kShift) +
               static_cast<std::uint32_t>(low - kSmallestNormal);
    }

    static OFFLOAD_HD std::int32_t random(std::int32_t magnitude, float uniform) {
        const std::int32_t low = binade(magnitude);
        const float steps_per_unit = from_bits((254 << 23) - (low - (3 << 23)));  // 8 / 2^exponent
        return ((low - kSmallestNormal) >> kShift) +
               round_randomly(from_bits(magnitude) * steps_per_unit, uniform);
    }

    /// What `encode` gives for a block without Inf and NaN; the code is the low byte.
    static OFFLOAD_HD std::int32_t encode_finite(float value, float inverse) {
        const auto bits = static_cast<std::uint32_t>(to_bits(value * inverse));
        const std::uint32_t code = nearest_shifted(bits & kMagnitudeMask) >> kShift;
        return static_cast<std::int32_t>(code | ((bits >> 24) & 0x80));
    }

    template <typename Type, bool kRandom>
    static OFFLOAD_HD std::uint8_t encode(typename Type::Word word, float inverse, float uniform) {
        const std::int32_t scaled = to_bits(Type::widen(word) * inverse) & kMagnitudeMask;
        const std::int32_t magnitude = smaller(scaled, kLimitBits);
        const std::int32_t code =
            kRandom ? random(magnitude, uniform)
                    : static_cast<std::int32_t>(nearest_shifted(magnitude) >> kShift);
        // The sign of the word: a multiplication on a card does not keep that of a NaN.
        const auto sign = static_cast<std::int32_t>((word >> (8 * sizeof(word) - 8)) & 0x80);
        return static_cast<std::uint8_t>(code | (is_nan<Type>(word) ? kNan : 0) | sign);
    }

    /// The code's bits read as a float32 of the lowest binade are too large by that binade's start
    /// where the exponent is 0; twice them less 2^-6 is right there and too large elsewhere.
    static OFFLOAD_HD float decode(std::uint8_t code, float scale) {
        const std::int32_t magnitude = code & 0x7f;
        const std::int32_t normal = (magnitude << kShift) + (120 << 23);
        const float denormal = from_bits(normal + (1 << 23)) - from_bits(kSmallestNormal);
        const float value = from_bits(smaller(normal, to_bits(denormal)));
        const auto sign = static_cast<std::int32_t>((code & 0x80u) << 24);
        return from_bits((magnitude == kNan ? kQuietNan : to_bits(value * scale)) | sign);
    }
};

/// int8: -127 to 127, and -128 for NaN.
struct Int8 {
    static constexpr float kLimit = 127.0f;
    static constexpr std::int32_t kLimitBits = 0x42fe0000;
    static constexpr std::uint8_t kNan = 0x80;

    /// The sum's last bit is worth one: it rounds to even and leaves the code in its low byte.
    static OFFLOAD_HD std::int32_t nearest(float scaled) { return to_bits(scaled + 0x1.8p23f); }

    static OFFLOAD_HD std::int32_t encode_finite(float value, float inverse) {
        return nearest(value * inverse);
    }

    static OFFLOAD_HD std::int32_t random(std::int32_t magnitude, std::int32_t sign,
                                          float uniform) {
        const std::int32_t steps = round_randomly(from_bits(magnitude), uniform);
        return sign != 0 ? -steps : steps;
    }

    template <typename Type, bool kRandom>
    static OFFLOAD_HD std::uint8_t encode(typename Type::Word word, float inverse, float uniform) {
        const std::int32_t scaled = to_bits(Type::widen(word) * inverse);
        const std::int32_t magnitude = smaller(scaled & kMagnitudeMask, kLimitBits);
        const std::int32_t sign = scaled & ~kMagnitudeMask;
        const std::int32_t code =
            kRandom ? random(magnitude, sign, uniform) : nearest(from_bits(magnitude | sign));
        return is_nan<Type>(word) ? kNan : static_cast<std::uint8_t>(code);
    }

    static OFFLOAD_HD float decode(std::uint8_t code, float scale) {
        const float value = static_cast<float>(static_cast<std::int8_t>(code)) * scale;
        return code == kNan ? from_bits(kQuietNan) : value;
    }
};

/// Eight bools, a byte each, as the bits of one byte, the first in the lowest. Little-endian.
OFFLOAD_HD std::uint8_t pack_bits(std::uint64_t bools) {
    constexpr std::uint64_t kLow = 0x7f7f7f7f7f7f7f7fu;
    const std::uint64_t ones = ((((bools & kLow) + kLow) | bools) >> 7) & 0x0101010101010101u;
    // Byte i is moved to bit 56 + i; no two products meet below that, so nothing is carried.
    return static_cast<std::uint8_t>((ones * 0x0102040810204080u) >> 56);
}

OFFLOAD_HD std::uint64_t unpack_bits(std::uint8_t bits) {
    const std::uint64_t spread = (bits * 0x0101010101010101u) & 0x8040201008040201u;
    return ((spread + 0x7f7f7f7f7f7f7f7fu) >> 7) & 0x0101010101010101u;
}

}  // namespace offload::codec
