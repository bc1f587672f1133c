"""Matrix products for the page to send, as a WebAssembly module with 128-bit vectors. Browsers run it several
times as fast as the same loops in JavaScript. The module is assembled here, so the repository contains no
binary file.

    int8(weights, scales, x, y, rows, columns)    y[i] = scales[i] * sum over j of weights[i, j] * x[j]
    int4(weights, scales, x, y, rows, columns)    the same, with a scale for each GROUP columns
    float32(weights, 0, x, y, rows, columns)      the same without scales; the weights are float32

The arguments are addresses in the imported memory and sizes; `columns` is a multiple of GROUP. x, y and
scales are float32. Weights in 8 and 4 bits are packed by `quantize` (tools/convert/quantized.py); float32 is
for keys and values. All multiplications and additions are in float32.

Opcodes: WebAssembly Core Specification 2.0, sections 5.4 (instructions) and 5.5 (modules).
"""

GROUP = 32  # columns per step of the loops, and per scale in int4
ZERO = 8  # the int4 code of 0
PARAMETERS = ("weights", "scales", "x", "y", "rows", "columns")
VECTORS = ("codes", "part", "sum_0", "sum_1", "sum_2", "sum_3")

I32, V128 = 0x7F, 0x7B
NO_RESULT = 0x40
# opcodes of the second group have the prefix 0xFD
OPCODES = {
    "loop": 0x03, "end": 0x0B, "br_if": 0x0D, "local.get": 0x20, "local.set": 0x21, "local.tee": 0x22,
    "f32.load": 0x2A, "f32.store": 0x38, "i32.const": 0x41, "i32.lt_u": 0x49, "i32.add": 0x6A,
    "i32.sub": 0x6B, "i32.shl": 0x74, "f32.add": 0x92, "f32.mul": 0x94,
}  # fmt: skip
VECTOR_OPCODES = {
    "v128.load": 0x00, "v128.load8x8_s": 0x01, "v128.load32_splat": 0x09, "i8x16.splat": 0x0F,
    "i32x4.splat": 0x11, "f32x4.extract_lane": 0x1F, "v128.and": 0x4E, "i8x16.shr_u": 0x6D,
    "i8x16.sub": 0x71, "i16x8.extend_low_i8x16_s": 0x87, "i16x8.extend_high_i8x16_s": 0x88,
    "i32x4.extend_low_i16x8_s": 0xA7, "i32x4.extend_high_i16x8_s": 0xA8, "f32x4.add": 0xE4,
    "f32x4.mul": 0xE6, "f32x4.convert_i32x4_s": 0xFA,
}  # fmt: skip


def products_module() -> bytes:
    """The module. It imports `env.memory` and exports `int8`, `int4` and `float32`."""
    scale_of_row = "local.get scales  f32.load 0  f32.mul " + _move("scales", 4)
    functions = {"int8": _function(_int8_columns(), scale_of_row), "int4": _function(_int4_columns())}
    functions["float32"] = _function(_float32_columns())
    kind = bytes([0x60]) + _vector([bytes([I32])] * len(PARAMETERS)) + _vector([])
    memory = _name("env") + _name("memory") + bytes([0x02, 0x00]) + _unsigned(1)
    exports = [_name(name) + bytes([0x00]) + _unsigned(i) for i, name in enumerate(functions)]
    sections = {
        1: [kind],
        2: [memory],
        3: [_unsigned(0)] * len(functions),  # their types
        7: exports,
        10: list(functions.values()),
    }
    module = b"\0asm" + (1).to_bytes(4, "little")
    for number, entries in sections.items():
        content = _vector(entries)
        module += bytes([number]) + _unsigned(len(content)) + content
    return module


def _function(columns: str, scale: str = "") -> bytes:
    """The code of a product. columns: code that adds the products of GROUP columns to the sums, and advances
    `weights`. scale: code that scales the sum of a row."""
    code = f"""
    loop
        local.get x  local.set x_now
        local.get x  local.get columns  i32.const 2  i32.shl  i32.add  local.set x_end
        {_clear("sum_0")} {_clear("sum_1")} {_clear("sum_2")} {_clear("sum_3")}
        loop
            {columns}
            {_move("x_now", 4 * GROUP)}
            local.get x_now  local.get x_end  i32.lt_u  br_if 0
        end
        local.get y  {_total()} {scale}  f32.store 0
        {_move("y", 4)}
        local.get rows  i32.const 1  i32.sub  local.tee rows  br_if 0
    end
    """
    body = _vector([_unsigned(2) + bytes([I32]), _unsigned(len(VECTORS)) + bytes([V128])]) + _assemble(code)
    return _unsigned(len(body)) + body


def _int8_columns() -> str:
    code = ""
    for i in range(GROUP // 8):
        code += f"local.get weights  v128.load8x8_s {8 * i}  local.set codes "
        code += _add_products("low", 8 * i, f"sum_{2 * i % 4}")
        code += _add_products("high", 8 * i + 4, f"sum_{2 * i % 4 + 1}")
    return code + _move("weights", GROUP)


def _int4_columns() -> str:
    """In a group, byte j holds the codes of columns j (lower half) and j + 16 (upper half)."""
    code = _clear("sum_1") + _clear("sum_2")
    for half in (0, 1):
        code += "local.get weights  v128.load 0 "
        code += "i32.const 4  i8x16.shr_u " if half else "i32.const 15  i8x16.splat  v128.and "
        code += f"i32.const {ZERO}  i8x16.splat  i8x16.sub  local.set part "
        for i, side in enumerate(("low", "high")):
            code += f"local.get part  i16x8.extend_{side}_i8x16_s  local.set codes "
            first = 16 * half + 8 * i
            code += _add_products("low", first, "sum_1") + _add_products("high", first + 4, "sum_2")
    code += "local.get sum_1  local.get sum_2  f32x4.add  local.get scales  v128.load32_splat 0  f32x4.mul "
    code += "local.get sum_0  f32x4.add  local.set sum_0 "
    # because the total adds all four sums
    code += _clear("sum_1") + _clear("sum_2")
    return code + _move("weights", GROUP // 2) + _move("scales", 4)


def _float32_columns() -> str:
    code = ""
    for i in range(GROUP // 4):
        code += f"local.get weights  v128.load {16 * i}  local.get x_now  v128.load {16 * i}  f32x4.mul "
        code += f"local.get sum_{i % 4}  f32x4.add  local.set sum_{i % 4} "
    return code + _move("weights", 4 * GROUP)


def _add_products(side: str, column: int, to: str) -> str:
    """Multiply four of the eight int16 `codes`, as numbers, by x from `column` on, and add the products to a
    sum."""
    return (
        f"local.get codes  i32x4.extend_{side}_i16x8_s  f32x4.convert_i32x4_s "
        f"local.get x_now  v128.load {4 * column}  f32x4.mul  local.get {to}  f32x4.add  local.set {to} "
    )


def _total() -> str:
    """Add the sums, and leave the result on the stack."""
    code = "local.get sum_0  local.get sum_1  f32x4.add  local.get sum_2  f32x4.add "
    code += "local.get sum_3  f32x4.add  local.set codes "
    for lane in range(4):
        code += f"local.get codes  f32x4.extract_lane {lane} " + ("f32.add " if lane else "")
    return code


def _clear(name: str) -> str:
    return f"i32.const 0  i32x4.splat  local.set {name} "


def _move(name: str, count: int) -> str:
    return f"local.get {name}  i32.const {count}  i32.add  local.set {name} "


# --- from text to bytes


def _assemble(code: str) -> bytes:
    """The bytes of instructions, each followed by its operand if it has one. The operand of a load or store
    is an offset."""
    numbers = {name: i for i, name in enumerate((*PARAMETERS, "x_now", "x_end", *VECTORS))}
    binary, words = b"", iter(code.split())
    for word in words:
        binary += _opcode(word)
        if word.startswith("local."):
            binary += _unsigned(numbers[next(words)])
        elif "load" in word or "store" in word:
            binary += _unsigned(0) + _unsigned(int(next(words)))  # no alignment is guaranteed
        elif word in ("f32x4.extract_lane", "br_if"):
            binary += _unsigned(int(next(words)))
        elif word == "i32.const":
            # signed LEB128 of a number that is not negative: bit 6 of the last byte is the sign
            binary += _unsigned(int(next(words)), largest_last=0x3F)
        elif word == "loop":
            binary += bytes([NO_RESULT])
    return binary + _opcode("end")


def _opcode(operation: str) -> bytes:
    if operation in OPCODES:
        return bytes([OPCODES[operation]])
    return bytes([0xFD]) + _unsigned(VECTOR_OPCODES[operation])


def _unsigned(value: int, largest_last: int = 0x7F) -> bytes:
    """LEB128. largest_last: of the last byte."""
    binary = b""
    while value > largest_last:
        binary += bytes([value & 0x7F | 0x80])
        value >>= 7
    return binary + bytes([value])


def _vector(entries: list[bytes]) -> bytes:
    return _unsigned(len(entries)) + b"".join(entries)


def _name(text: str) -> bytes:
    return _vector([text.encode()[i : i + 1] for i in range(len(text))])
