#include <algorithm>
#include <atomic>
#include <optional>
#include <system_error>
#include <thread>
#include <vector>

#include "check.h"
#include "codec.h"
#include "codec_host_kernels.h"
#include "codec_index.h"
#include "codec_lane.h"
#include "codec_layout.h"

// One body for several instruction sets, chosen when the module is loaded, unless the build asks
// for a good one itself. Sanitizers do not support the resolvers, which run before their runtime is
// up.
#if defined(__AVX2__)
#define OFFLOAD_CLONES
#define OFFLOAD_LOOKS_UP_BYTES true
#elif defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && \
    defined(__GLIBC__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define OFFLOAD_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#define OFFLOAD_LOOKS_UP_BYTES __builtin_cpu_supports("avx2")
#else
#define OFFLOAD_CLONES
#define OFFLOAD_LOOKS_UP_BYTES false
#endif

namespace offload {
namespace {

using namespace codec;

constexpr int kMostThreads = 16;
constexpr std::int64_t kChunkBlocks = 512;       // 64 Ki values: some 50 us
constexpr std::int64_t kMinThreadBlocks = 2048;  // a thread costs as much to start as these to code

struct EncodeTask {
    Codec codec;
    DType dtype;
    StridedMap map;
    const void* source;
    std::uint8_t* codes;
    float* scales;
    std::optional<std::uint64_t> seed;
};

struct DecodeTask {
    Codec codec;
    DType dtype;
    StridedMap map;
    const std::uint8_t* codes;
    const float* scales;
    void* destination;
    bool by_table;
};

template <typename Code, typename Type, bool kRandom>
OFFLOAD_HD void encode_range(const EncodeTask& task, std::int64_t begin, std::int64_t end) {
    using Word = typename Type::Word;
    Word gathered[kBlock];
    Block block = block_at(task.map, begin);
    while (true) {
        const int count = block.count(task.map);
        const Word* words = static_cast<const Word*>(task.source) + block.source(task.map);
        if (task.map.step != 1) {
            for (int i = 0; i < count; ++i) {
                gathered[i] = words[i * task.map.step];
            }
            words = gathered;
        }
        const std::uint64_t key = kRandom ? random_key(*task.seed, block.index) : 0;
        task.scales[block.index] = encode_block<Code, Type, kRandom>(
            words, count, key, task.codes + block.codes(task.map));
        if (block.index + 1 == end) {
            return;
        }
        block = next_block(task.map, block);
    }
}

template <typename Code, typename Type>
OFFLOAD_HD void decode_range(const DecodeTask& task, std::int64_t begin, std::int64_t end) {
    using Word = typename Type::Word;
    Word scattered[kBlock];
    Block block = block_at(task.map, begin);
    while (true) {
        const int count = block.count(task.map);
        Word* const words = static_cast<Word*>(task.destination) + block.source(task.map);
        const bool dense = task.map.step == 1;
        decode_block<Code, Type>(task.codes + block.codes(task.map), count,
                                 task.scales[block.index], task.by_table,
                                 dense ? words : scattered);
        for (int i = 0; i < count && !dense; ++i) {
            words[i * task.map.step] = scattered[i];
        }
        if (block.index + 1 == end) {
            return;
        }
        block = next_block(task.map, block);
    }
}

template <typename Code, typename Type>
OFFLOAD_HD void encode_range(const EncodeTask& task, std::int64_t begin, std::int64_t end) {
    if (task.seed.has_value()) {
        encode_range<Code, Type, true>(task, begin, end);
    } else {
        encode_range<Code, Type, false>(task, begin, end);
    }
}

/// Calls `visit` with the tags of the codec and of the element type.
template <typename Visit>
OFFLOAD_HD void with_types(Codec codec, DType dtype, const Visit& visit) {
    const bool fp8 = codec == Codec::kFp8;
    if (dtype == DType::kBFloat16) {
        fp8 ? visit(Fp8{}, BFloat16{}) : visit(Int8{}, BFloat16{});
    } else if (dtype == DType::kFloat16) {
        fp8 ? visit(Fp8{}, Float16{}) : visit(Int8{}, Float16{});
    } else {
        fp8 ? visit(Fp8{}, Float32{}) : visit(Int8{}, Float32{});
    }
}

OFFLOAD_CLONES void encode_blocks(const EncodeTask& task, std::int64_t begin, std::int64_t end) {
    with_types(task.codec, task.dtype, [&](auto code, auto type) __attribute__((always_inline)) {
        encode_range<decltype(code), decltype(type)>(task, begin, end);
    });
}

OFFLOAD_CLONES void decode_blocks(const DecodeTask& task, std::int64_t begin, std::int64_t end) {
    with_types(task.codec, task.dtype, [&](auto code, auto type) __attribute__((always_inline)) {
        decode_range<decltype(code), decltype(type)>(task, begin, end);
    });
}

/// Packs bytes `begin` to `end` of the bits of `map`'s elements.
void pack_range(const StridedMap& map, const std::uint8_t* source, std::uint8_t* bits,
                std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
        bits[i] = pack_bits(load_bools(map, source, i));
    }
}

void unpack_range(const StridedMap& map, const std::uint8_t* bits, std::uint8_t* destination,
                  std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
        store_bools(map, unpack_bits(bits[i]), destination, i);
    }
}

int thread_count(std::int64_t items, int threads) {
    const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
    const int wanted = threads > 0 ? threads : std::min(cores, kMostThreads);
    return static_cast<int>(
        std::clamp<std::int64_t>(items / kMinThreadBlocks, 1, static_cast<std::int64_t>(wanted)));
}

/// Runs `work(begin, end)` over chunks of `items` on the calling thread and helpers. Threads start
/// and end here, so a forked child finds nothing of its parent; one that the system refuses to
/// start only leaves more to the others.
template <typename Work>
void in_parallel(std::int64_t items, int threads, const Work& work) {
    std::atomic<std::int64_t> next{0};
    const auto take_chunks = [&] {
        for (std::int64_t begin = next.fetch_add(kChunkBlocks); begin < items;
             begin = next.fetch_add(kChunkBlocks)) {
            work(begin, std::min(begin + kChunkBlocks, items));
        }
    };
    std::vector<std::thread> helpers;
    try {
        for (int helper = thread_count(items, threads); helper > 1; --helper) {
            helpers.emplace_back(take_chunks);
        }
    } catch (const std::system_error&) {
    }
    take_chunks();
    for (std::thread& helper : helpers) {
        helper.join();
    }
}

}  // namespace

void encode_host(Codec codec, const TensorLayout& layout, const void* source, void* encoded,
                 std::optional<std::uint64_t> seed, int threads) {
    const StridedMap map = source_map("encode", codec, layout);
    check_encoded_address("encode", encoded);
    check_seed("encode", codec, seed);
    auto* const codes = static_cast<std::uint8_t*>(encoded);
    if (codec == Codec::kBits) {
        const auto* const bools = static_cast<const std::uint8_t*>(source);
        in_parallel((map.elements() + 7) / 8, threads, [&](std::int64_t begin, std::int64_t end) {
            pack_range(map, bools, codes, begin, end);
        });
        return;
    }
    auto* const scales = reinterpret_cast<float*>(codes + scales_offset(map));
    const EncodeTask task{codec, layout.dtype, map, source, codes, scales, seed};
    in_parallel(map.blocks(), threads,
                [&](std::int64_t begin, std::int64_t end) { encode_blocks(task, begin, end); });
}

void decode_host(Codec codec, const TensorLayout& layout, const void* encoded, void* destination,
                 int threads) {
    const StridedMap map = destination_map("decode", codec, layout);
    check_encoded_address("decode", encoded);
    const auto* const codes = static_cast<const std::uint8_t*>(encoded);
    if (codec == Codec::kBits) {
        auto* const bools = static_cast<std::uint8_t*>(destination);
        in_parallel((map.elements() + 7) / 8, threads, [&](std::int64_t begin, std::int64_t end) {
            unpack_range(map, codes, bools, begin, end);
        });
        return;
    }
    const auto* const scales = reinterpret_cast<const float*>(codes + scales_offset(map));
    const bool by_table = OFFLOAD_LOOKS_UP_BYTES;
    const DecodeTask task{codec, layout.dtype, map, codes, scales, destination, by_table};
    in_parallel(map.blocks(), threads,
                [&](std::int64_t begin, std::int64_t end) { decode_blocks(task, begin, end); });
}

}  // namespace offload
